"""Elementwise functions, and gradients of some."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tflite_tools.rules.registry import register


@register("DivNoNan")
def divide_no_nan(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """x / y; 0 where y is."""
    is_zero = tf.equal(y, 0)
    return tf.where(is_zero, tf.zeros_like(x / y), x / tf.where(is_zero, tf.ones_like(y), y))


@register("MulNoNan")
def multiply_no_nan(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """x * y; 0 where y is, whatever x."""
    return tf.where(tf.equal(y, 0), tf.zeros_like(x * y), x * y)


@register("RsqrtGrad")
def rsqrt(op: tf.Operation, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """By the output: -y³/2."""
    return dy * (-0.5 * y) * (y * y)


@register("SqrtGrad")
def sqrt(op: tf.Operation, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """By the output: 1/2y."""
    return dy * 0.5 / y


@register("Reciprocal", "Inv")
def reciprocal(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """1 / x."""
    return 1.0 / x


@register("ReciprocalGrad", "InvGrad")
def reciprocal_gradient(op: tf.Operation, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """By the output: -y²."""
    return -dy * y * y


@register("Log1p")
def log1p(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """log(1 + x): where x is small, by way of what 1 + x has lost of it.

    With u = fl(1 + x): log(u) * x / (u - 1), or x if u is 1 (Kahan, in HP-15C Advanced Functions
    Handbook, 1982).
    """
    u = 1.0 + x
    lost = tf.equal(u, 1.0)
    return tf.where(lost, x, tf.math.log(u) * (x / tf.where(lost, tf.ones_like(u), u - 1.0)))


@register("Expm1")
def expm1(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """exp(x) - 1: 2 tanh(x/2) / (1 - tanh(x/2)) where that keeps what exp(x) - 1 would lose."""
    t = tf.tanh(x / 2)
    near = tf.abs(x) < 1.0
    return tf.where(near, 2 * t / tf.where(near, 1 - t, tf.ones_like(t)), tf.exp(x) - 1)


# Of TensorFlow's own approximation in single precision (Eigen, generic_fast_erf_float of 2018):
# x * p(x²) / q(x²) within +-4, beyond which float32 cannot tell erf from +-1.
_ERF_P = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


@register("Erf")
def erf(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """The error function, to a few units in the last place of float32."""
    x = tf.clip_by_value(x, -4.0, 4.0)
    square = x * x
    p = q = tf.zeros_like(x)
    for coefficient in _ERF_P:
        p = p * square + np.float32(coefficient)
    for coefficient in _ERF_Q:
        q = q * square + np.float32(coefficient)
    return x * p / q


@register("Erfc")
def erfc(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """1 - erf(x)."""
    return 1.0 - erf(op, x)


@register("Xlogy")
def xlogy(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """x log(y); 0 where x is."""
    is_zero = tf.equal(x, 0)
    return tf.where(is_zero, tf.zeros_like(x * y), x * tf.math.log(tf.where(is_zero, 1.0, y)))


@register("Xdivy")
def xdivy(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """x / y; 0 where x is."""
    is_zero = tf.equal(x, 0)
    return tf.where(is_zero, tf.zeros_like(x * y), x / tf.where(is_zero, 1.0, y))


@register("BitwiseAnd")
def bitwise_and(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """With the sign bit only, by which Keras tells -0.0 from 0.0 in an argmax."""
    sign = tf.get_static_value(y)
    if sign is None or x.dtype != tf.int32 or np.any(sign != np.iinfo(np.int32).min):
        raise NotImplementedError("other than with the sign bit of an int32")
    return tf.where(x < 0, tf.constant(np.iinfo(np.int32).min, tf.int32), tf.zeros_like(x))
