"""Backward primitives of max pooling over windows that do not overlap."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def max_pool_gradient(
    dy: tf.Tensor, selected: tf.Tensor, pool_size: Sequence[int], padding: str
) -> tf.Tensor:
    """Gradient of max pooling with strides equal to the window, channels last.

    Every input element belongs to one window at most, so one bit an element, whether
    it was its window's maximum, replaces the input and the output.

    Args:
        dy: Gradient of the output, `[batch, *pooled, channels]`.
        selected: Boolean, `[batch, *spatial, channels]`: the maximum of its window (the
            first, where there are several).
        pool_size: The window, an int for each spatial dimension.
        padding: `"valid"` or `"same"`.

    Returns:
        The gradient of the input, in the shape of `selected`.
    """
    shape = tf.shape(selected)
    for axis, window in enumerate(pool_size, start=1):
        dy = tf.repeat(dy, window, axis=axis)
        # "same" pads before by half the excess, rounded down; "valid" drops the rest.
        excess = tf.shape(dy)[axis] - shape[axis]
        before = tf.maximum(excess, 0) // 2 if padding == "same" else tf.zeros([], tf.int32)
        missing = tf.maximum(-excess, 0)
        paddings = [[0, 0]] * dy.shape.rank
        paddings[axis] = [0, missing]
        dy = tf.pad(dy, paddings)
        dy = tf.gather(dy, tf.range(before, before + shape[axis]), axis=axis)
    return dy * tf.cast(selected, dy.dtype)
