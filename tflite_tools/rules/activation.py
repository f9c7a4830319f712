"""Gradients of activation functions."""

from __future__ import annotations

import tensorflow as tf

from tflite_tools.rules.registry import attribute, register


def _where(condition: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return tf.cast(condition, like.dtype)


@register("ReluGrad")
def relu(op: tf.Operation, dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """1 where the output is positive."""
    return dy * _where(y > 0, dy)


@register("Relu6Grad")
def relu6(op: tf.Operation, dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """1 where the output is between its limits."""
    # One comparison: of an output, which is from 0 to 6, none of the factors is negative.
    return dy * _where(y * (6 - y) > 0, dy)


@register("LeakyReluGrad")
def leaky_relu(op: tf.Operation, dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """1 where the input is positive, the slope elsewhere."""
    return tf.where(x > 0, dy, dy * attribute(op, "alpha"))


@register("EluGrad")
def elu(op: tf.Operation, dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """exp(x) = y + 1 where the output is negative."""
    return tf.where(y < 0, dy * (y + 1), dy)


@register("Selu")
def selu(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """Klambauer et al. (2017), arXiv 1706.02515."""
    return _SELU_SCALE * tf.where(x < 0, _SELU_SCALE_ALPHA / _SELU_SCALE * (tf.exp(x) - 1), x)


@register("SeluGrad")
def selu_gradient(op: tf.Operation, dy: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """As `selu`, by the output."""
    return dy * tf.where(y < 0, y + _SELU_SCALE_ALPHA, _SELU_SCALE)


_SELU_SCALE = 1.0507009873554804934193349852946
_SELU_SCALE_ALPHA = 1.7580993408473768599402175208123


@register("SigmoidGrad")
def sigmoid(op: tf.Operation, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """By the output."""
    return dy * y * (1 - y)


@register("TanhGrad")
def tanh(op: tf.Operation, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """By the output."""
    return dy * (1 - y * y)


@register("Softplus")
def softplus(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """log(1 + exp(x)), without overflow."""
    return tf.nn.relu(x) + tf.math.log(1 + tf.exp(-tf.abs(x)))


@register("Softsign")
def softsign(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """x / (1 + |x|)."""
    return x / (1 + tf.abs(x))


@register("SoftsignGrad")
def softsign_gradient(op: tf.Operation, dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """1 / (1 + |x|)²."""
    return dy / tf.square(1 + tf.abs(x))
