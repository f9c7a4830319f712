"""The native kernels as Python functions; only to be called where `available()`.

One TensorFlow operation each, defined in `kernels.cc`. They have no gradient: the
package's layers bring their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from bittrain_tf import second_derivatives
from bittrain_tf.native.load import native

OPERATION_PREFIX = "Bittrain>"
_NO_MASK: list[int] = []


def available() -> bool:
    """Whether the kernels can be had; the first call in a process may compile them."""
    return native().ops is not None


def threads() -> int:
    """How many threads a kernel may use: as many as TensorFlow's own operations."""
    configured = tf.config.threading.get_intra_op_parallelism_threads()
    if configured:
        return configured
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _ops() -> Any:
    return native().ops


def encode(x: tf.Tensor, support: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """The bitmap (uint8, rank 1) and the non-zeros (rank 1) of a floating-point tensor.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape.
        support: A packed mask that may be the bitmap; if it is, the bitmap comes back empty.
    """
    bitmap, values = _ops().bittrain_encode(
        x=x, support=[] if support is None else [support], threads=threads()
    )
    return bitmap, values


def decode(shape: tf.Tensor, values: tf.Tensor, bitmaps: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensor of `shape` (int64) that `encode` made the values and the bitmap of.

    Args:
        shape: Its shape.
        values: Its non-zeros.
        bitmaps: The bitmap; or an empty one, and the support.

    Raises:
        tf.errors.InvalidArgumentError: If these do not belong together.
    """
    return _ops().bittrain_decode(
        shape=shape, values=values, bitmaps=list(bitmaps), threads=threads()
    )


def mark_positive(x: tf.Tensor, *, below_six: bool = False) -> tf.Tensor:
    """The packed mask of `x > 0` or `0 < x < 6`."""
    return _ops().bittrain_mark_positive(x=x, below_six=below_six, threads=threads())


def mark_true(x: tf.Tensor) -> tf.Tensor:
    """The packed mask of a boolean tensor."""
    return _ops().bittrain_mark_true(x=x, threads=threads())


def multiply(dy: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
    """`dy` times a packed mask of its size; in place if nobody else needs `dy`."""
    return _ops().bittrain_multiply(dy=dy, packed=packed, threads=threads())


def choose(dy: tf.Tensor, packed: tf.Tensor, *, on: float, off: float) -> tf.Tensor:
    """`dy * on` where a packed mask is set, else `dy * off` (zero if `off` is); float32."""
    return _ops().bittrain_choose(dy=dy, packed=packed, on=on, off=off, threads=threads())


def normalize(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """`x * scale + offset`, the latter two of shape `[channels]`; float32."""
    y, _ = _ops().bittrain_normalize(x=x, scale=scale, offset=offset, limit=0, threads=threads())
    return y


def normalize_and_rectify(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, *, limit: float, marked: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """`x * scale + offset`, at least 0 and at most `limit`, and the packed mask of in between.

    Args:
        x: float32.
        scale: Of shape `[channels]`.
        offset: Likewise.
        limit: May be infinite.
        marked: Whether the mask is wanted; else it is empty.
    """
    y, packed = _ops().bittrain_normalize(
        x=x,
        scale=scale,
        offset=offset,
        rectified=True,
        limit=limit,
        marked=marked,
        threads=threads(),
    )
    return y, packed


def normalize_gradient(
    dy: tf.Tensor,
    packed: tf.Tensor | None,
    x: tf.Tensor,
    mean: tf.Tensor,
    inv_std: tf.Tensor,
    scale: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Gradients of `gamma * (x - mean) * inv_std + beta`, the statistics being those of `x`.

    Args:
        dy: Gradient of the output; its buffer is used for `dx` if nobody else needs it.
        packed: A mask to multiply `dy` by first, or None.
        x: The input, float32.
        mean: Of shape `[channels]`.
        inv_std: Likewise.
        scale: `gamma * inv_std`, likewise.

    Returns:
        `(dx, dgamma, dbeta)`.
    """
    dx, dgamma, dbeta = _ops().bittrain_normalize_gradient(
        dy=dy,
        packed=tf.constant(_NO_MASK, tf.uint8) if packed is None else packed,
        x=x,
        mean=mean,
        inv_std=inv_std,
        scale=scale,
        marked=packed is not None,
        threads=threads(),
    )
    return dx, dgamma, dbeta


def max_pool(x: tf.Tensor, pool_size: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Max pooling over disjoint windows, and the packed mask of the (first) maxima.

    Args:
        x: float32 of shape `[batch, height, width, channels]`, known but for the batch;
            height and width multiples of the window's, channels of 8.
        pool_size: Height and width of the window.
    """
    height, width = pool_size
    y, packed = _ops().bittrain_max_pool(
        x=x, window_height=height, window_width=width, threads=threads()
    )
    batch, *spatial, channels = x.shape
    # A shape function of the C API can make no shape of numbers. What follows a tensor of unknown
    # shape would be computed in other ways, with other rounding.
    shape = [batch, *(n // k for n, k in zip(spatial, pool_size, strict=True)), channels]
    return tf.ensure_shape(y, shape), packed


def max_pool_gradient(dy: tf.Tensor, packed: tf.Tensor, pool_size: Sequence[int]) -> tf.Tensor:
    """The gradient of `max_pool`'s input: that of the output at the maxima, else zero."""
    height, width = pool_size
    return _ops().bittrain_max_pool_gradient(
        dy=dy, packed=packed, window_height=height, window_width=width, threads=threads()
    )


for _name in (
    "Encode",
    "Decode",
    "Multiply",
    "Choose",
    "Normalize",
    "NormalizeGradient",
    "MaxPool",
    "MaxPoolGradient",
):
    tf.RegisterGradient(OPERATION_PREFIX + _name)(second_derivatives.refuse)
