"""Backward primitives: the gradients the layers call, one file a family."""
