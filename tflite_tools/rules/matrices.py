"""Products of matrices.

Without a delegate, TensorFlow Lite multiplies matrices that are not constants in a plain loop; its
convolutions are optimized.
"""

from __future__ import annotations

import tensorflow as tf

from tflite_tools.rules.registry import attribute, register


def product_over_rows(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """`transpose(x) @ y`, as a convolution with a kernel of one pixel."""
    rows, height = x.shape
    width = y.shape[1]
    image = tf.reshape(tf.transpose(x), [1, height, 1, rows])
    kernel = tf.reshape(y, [1, 1, rows, width])
    return tf.reshape(tf.nn.conv2d(image, kernel, 1, "VALID"), [height, width])


@register("MatMul")
def matmul(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor | None:
    """The gradient of a dense layer's kernel by `product_over_rows`.

    Not the others: the converter fails where a convolution's output is multiplied by a constant, as
    gradients of activations are.
    """
    if attribute(op, "transpose_a") and not attribute(op, "transpose_b"):
        return product_over_rows(x, y)
    return None
