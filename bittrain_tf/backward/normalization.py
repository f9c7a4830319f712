"""Backward primitives of normalizations."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def batch_norm_gradient(
    dy: tf.Tensor,
    x: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    gamma: tf.Tensor | None,
    axis: int,
    epsilon: float,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of `gamma * (x - mean) / sqrt(variance + epsilon) + beta` by batch statistics.

    Ioffe and Szegedy, 2015 (arXiv 1502.03167), section 3, arranged so that no more
    than three tensors of `x`'s size are alive at once. Differentiating the formula
    operation by operation, as a tape does, holds up to nine.

    Args:
        dy: Gradient of the output.
        x: The input, of the same shape and dtype.
        mean: Its mean over all axes but `axis`, shape `[channels]`.
        variance: Its variance, likewise.
        gamma: The scale, likewise, or None for 1.
        axis: The channel axis.
        epsilon: Added to the variance.

    Returns:
        `(dx, dgamma, dbeta)`, the last two of shape `[channels]`.
    """
    axes = [i for i in range(x.shape.rank) if i != axis % x.shape.rank]
    broadcast = [1] * x.shape.rank
    broadcast[axis] = -1
    count = tf.cast(tf.size(x) // tf.size(mean), x.dtype)
    inv_std = tf.math.rsqrt(variance + epsilon)
    dbeta = tf.reduce_sum(dy, axes)
    centred = x - tf.reshape(mean, broadcast)
    dgamma = tf.reduce_sum(dy * centred, axes) * inv_std
    # Both sums are inputs of what follows, so their temporaries are gone before it runs.
    slope = tf.reshape(dgamma * inv_std / count, broadcast)
    offset = tf.reshape(dbeta / count, broadcast)
    scale = tf.reshape(inv_std if gamma is None else inv_std * gamma, broadcast)
    return (dy - (centred * slope + offset)) * scale, dgamma, dbeta


def sample_norm_gradient(
    dy: tf.Tensor, x_hat: tf.Tensor, inv_std: tf.Tensor, axes: Sequence[int], *, centred: bool
) -> tf.Tensor:
    """Gradient of `x_hat = (x - mean) * inv_std` by the statistics of each sample.

    Ba, Kiros and Hinton, 2016 (arXiv 1607.06450), as in `batch_norm_gradient`.

    Args:
        dy: Gradient of `x_hat`.
        x_hat: The normalized input, of the same shape and dtype.
        inv_std: The inverse of the deviation, of size 1 along `axes`.
        axes: What the statistics are taken over.
        centred: Whether a mean was subtracted.
    """
    slope = tf.reduce_mean(dy * x_hat, axes, keepdims=True)
    offset = tf.reduce_mean(dy, axes, keepdims=True) if centred else 0.0
    return (dy - (x_hat * slope + offset)) * inv_std
