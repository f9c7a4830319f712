"""Pruning activations while training: schedule and thresholds, the callback, its report."""
