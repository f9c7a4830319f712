"""Gradients of pooling."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tflite_tools.rules.registry import attribute, register
from tflite_tools.rules.windows import Windows


def _windows(op: tf.Operation, x_shape: list[int], y_shape: list[int]) -> Windows:
    kernel = list(attribute(op, "ksize"))
    if kernel[0] != 1 or kernel[3] != 1:
        raise NotImplementedError("pooling over samples or channels")
    return Windows(op, x_shape[1:3], y_shape[1:3], kernel[1:3])


@register("MaxPoolGrad")
def max_pool(op: tf.Operation, x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """To the first of the maxima in each window, as TensorFlow's own."""
    windows = _windows(op, x.shape.as_list(), y.shape.as_list())
    padded = windows.pad(x, value=float(np.finfo(np.float32).min))
    left = dy

    def tap(i: int, j: int) -> tf.Tensor:
        nonlocal left
        is_maximum = tf.cast(tf.equal(windows.tap(padded, i, j), y), dy.dtype)
        part = is_maximum * left
        left = left - part
        return part

    return windows.spread(tap)


@register("AvgPoolGrad")
def average_pool(op: tf.Operation, x_shape: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """An equal share to each of a window's elements that is not padding."""
    shape = [int(n) for n in tf.get_static_value(x_shape)]
    windows = _windows(op, shape, dy.shape.as_list())
    counts = [
        np.array(
            [
                sum(
                    0 <= n * windows.stride[k] + i - windows.before[k] < windows.size[k]
                    for i in range(windows.kernel[k])
                )
                for n in range(windows.count[k])
            ],
            np.float32,
        )
        for k in (0, 1)
    ]
    share = dy / (counts[0][:, None, None] * counts[1][None, :, None])
    return windows.spread(lambda i, j: share)
