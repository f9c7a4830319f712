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
    sizes, windows = tf.shape(selected), list(pool_size)
    spatial = range(1, len(windows) + 1)
    pooled = [tf.shape(dy)[axis] for axis in spatial]
    aligned, offsets = selected, [0] * selected.shape.rank
    if any(
        selected.shape[axis] is None or selected.shape[axis] % window
        for axis, window in zip(spatial, windows, strict=True)
    ):
        # "same" windows reach over the edges, half of the excess before; "valid" ones leave
        # a rest uncovered. Either way the windows' extent replaces the input's here.
        aligned, offsets = _align(selected, pooled, windows, padding)
    split_dy, split_input = [sizes[0]], [sizes[0]]
    for count, window in zip(pooled, windows, strict=True):
        split_dy += [count, 1]
        split_input += [count, window]
    passes = tf.reshape(aligned, [*split_input, sizes[-1]])
    # Not a product: that does not broadcast so many axes, is slower, and makes an infinite
    # gradient (of a scaled loss) NaN all over its window.
    dx = tf.where(passes, tf.reshape(dy, [*split_dy, sizes[-1]]), tf.zeros([], dy.dtype))
    dx = tf.reshape(dx, tf.shape(aligned))
    if aligned is not selected:
        dx = _unalign(dx, sizes, offsets)
    return tf.ensure_shape(dx, selected.shape)


def _align(
    selected: tf.Tensor, pooled: Sequence[tf.Tensor], windows: Sequence[int], padding: str
) -> tuple[tf.Tensor, list[tf.Tensor | int]]:
    """`selected` cut or filled to the extent of the windows, and where it begins there."""
    rank = len(windows) + 2
    offsets: list[tf.Tensor | int] = [0] * rank
    paddings: list[list[tf.Tensor | int]] = [[0, 0] for _ in range(rank)]
    for axis, (count, window) in enumerate(zip(pooled, windows, strict=True), start=1):
        excess = count * window - tf.shape(selected)[axis]
        if padding == "same":
            offsets[axis] = excess // 2
            paddings[axis] = [excess // 2, excess - excess // 2]
    extent = [tf.shape(selected)[0]]
    extent += [count * window for count, window in zip(pooled, windows, strict=True)]
    extent += [tf.shape(selected)[-1]]
    return tf.slice(tf.pad(selected, paddings), [0] * rank, extent), offsets


def _unalign(dx: tf.Tensor, sizes: tf.Tensor, offsets: Sequence[tf.Tensor | int]) -> tf.Tensor:
    """The reverse for the gradient; elements no window covers get zero."""
    missing = tf.maximum(sizes - (tf.shape(dx) - tf.stack(offsets)), 0)
    dx = tf.pad(dx, tf.stack([tf.zeros_like(missing), missing], axis=1))
    return tf.slice(dx, tf.stack(offsets), sizes)
