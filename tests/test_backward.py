"""Backward primitives against `tf.GradientTape` on the forward computation."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_bits, sparse

from bittrain_tf.backward.normalization import batch_norm_gradient
from bittrain_tf.backward.pooling import max_pool_gradient
from bittrain_tf.backward.vjp import vjp


def gradients(fn, inputs, dy):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = fn(*inputs)
    return tape.gradient(y, inputs, output_gradients=dy)


def selected(pool, x):
    """Which elements of `x` are the maxima."""
    return gradients(pool, [x], tf.ones_like(pool(x)))[0] != 0


@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4, 6, 7, 9])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_max_pool_gradient(rank, size, window, padding):
    x = tf.constant(sparse((2, *(size + i for i in range(rank)), 3)))
    windows = [window, *(max(1, window - 1) for _ in range(rank - 1))]

    def pool(x):
        return keras.ops.max_pool(x, tuple(windows), tuple(windows), padding)

    dy = tf.constant(sparse(pool(x).shape, density=1.0, seed=1))
    (expected,) = gradients(pool, [x], dy)
    np.testing.assert_array_equal(
        max_pool_gradient(dy, selected(pool, x), windows, padding), expected
    )


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_max_pool_gradient_of_unknown_sizes(padding):
    def pool(x):
        return keras.ops.max_pool(x, 3, 3, padding)

    @tf.function(input_signature=[tf.TensorSpec([None, None, None, 2])] * 2)
    def both(x, dy):
        return max_pool_gradient(dy, selected(pool, x), [3, 3], padding), gradients(pool, [x], dy)

    for size in (3, 5, 7):
        x = tf.constant(sparse((2, size, size + 1, 2)))
        actual, (expected,) = both(x, tf.ones_like(pool(x)))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("special", [np.inf, np.nan])
def test_max_pool_gradient_keeps_what_is_not_finite_in_its_place(special):
    dy = tf.constant([[[special], [2.0]]])
    dx = max_pool_gradient(dy, tf.constant([[[True], [False], [False], [True]]]), [2], "valid")
    assert_same_bits(tf.reshape(dx, [-1]), np.float32([special, 0, 0, 2]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [-1, 1, 2])
@pytest.mark.parametrize("scaled", [True, False], ids=["gamma", "no gamma"])
def test_batch_norm_gradient(scaled, axis, dtype):
    x = tf.constant(sparse((4, 5, 6, 3), dtype))
    channels = x.shape[axis]
    gamma = tf.constant(sparse((channels,), dtype, 1.0, seed=1)) if scaled else None
    beta = tf.zeros([channels], dtype)
    axes = [i for i in range(4) if i != axis % 4]
    epsilon = 1e-3

    def normalize(x, beta, *gamma):
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        shape = mean.shape
        scale = tf.reshape(gamma[0], shape) if gamma else None
        return tf.nn.batch_normalization(x, mean, variance, tf.reshape(beta, shape), scale, epsilon)

    dy = tf.constant(sparse(x.shape, dtype, 1.0, seed=2))
    expected_dx, expected_dbeta, *expected_dgamma = gradients(
        normalize, [x, beta] + ([gamma] if scaled else []), dy
    )
    mean, variance = tf.nn.moments(x, axes)
    dx, dgamma, dbeta = batch_norm_gradient(dy, x, mean, variance, gamma, axis, epsilon)
    # Sums of some hundred terms of order 1, in another order.
    atol = 300 * np.finfo(dtype).eps
    np.testing.assert_allclose(dx, expected_dx, rtol=0, atol=atol)
    np.testing.assert_allclose(dbeta, expected_dbeta, rtol=0, atol=atol)
    for expected in expected_dgamma:
        np.testing.assert_allclose(dgamma, expected, rtol=0, atol=atol)


def test_vjp_is_the_tapes_gradient():
    x, w = tf.constant(sparse((2, 5, 5, 3))), tf.constant(sparse((3, 3, 3, 2), seed=1))

    def convolve(x, w):
        return keras.ops.conv(x, w)

    dy = tf.constant(sparse((2, 3, 3, 2), seed=2))
    for actual, expected in zip(
        vjp(convolve, [x, w], dy), gradients(convolve, [x, w], dy), strict=True
    ):
        assert_same_bits(actual, expected)


def test_vjp_of_an_input_without_influence_is_none():
    gradient, nothing = vjp(lambda x, y: 2 * x, [tf.ones([2]), tf.ones([2])], tf.ones([2]))
    np.testing.assert_array_equal(gradient, [2, 2])
    assert nothing is None
