"""Booleans at one bit an element.

All that a ReLU's or a dropout's backward pass needs, and the bitmap of the
bitmap codec. Bit `i` of byte `b` is element `8 * b + i` in row-major order; the
last byte is filled up with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bittrain_tf import native
from bittrain_tf.codecs.base import shared_function

# Eight 0/1 bytes read as one little-endian integer, times this constant, leave byte i's
# value in bit i of the product's highest byte (no two partial products meet there).
_GATHER_BITS = 0x0102040810204080

_BITS_OF_BYTE = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(bool)


def pack(mask: tf.Tensor) -> tf.Tensor:
    """Pack a boolean tensor of any shape, `ceil(size / 8)` bytes (uint8, rank 1)."""
    with tf.name_scope("encode_mask"):
        return native.mark_true(mask) if native.available() else _pack(tf.reshape(mask, [-1]))


def pack_positive(x: tf.Tensor) -> tf.Tensor:
    """The packed mask of `x > 0`."""
    if not native.available():
        return pack(x > 0)
    with tf.name_scope("encode_mask"):
        return native.mark_positive(x)


def pack_within_six(x: tf.Tensor) -> tf.Tensor:
    """The packed mask of `0 < x < 6`."""
    if not native.available():
        return pack((x > 0) & (x < 6))
    with tf.name_scope("encode_mask"):
        return native.mark_positive(x, below_six=True)


def multiply(dy: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
    """`dy` times a packed mask.

    A product, not a selection, as in TensorFlow's ReluGrad: the same bits for -0.0 and NaN.
    """
    return native.multiply(dy, packed) if native.available() else dy * _like(dy, packed, dy.dtype)


def choose(dy: tf.Tensor, packed: tf.Tensor, *, on: float, off: float) -> tf.Tensor:
    """`dy * on` where a packed mask is set, else `dy * off`, or plain zero if `off` is 0."""
    if native.available() and dy.dtype == tf.float32:
        return native.choose(dy, packed, on=on, off=off)
    unmarked = dy * tf.constant(off, dy.dtype) if off else tf.zeros([], dy.dtype)
    marked = dy if on == 1 else dy * tf.constant(on, dy.dtype)
    return tf.where(_like(dy, packed, tf.bool), marked, unmarked)


def _like(x: tf.Tensor, packed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.reshape(unpack(packed, tf.size(x, out_type=tf.int64), dtype), tf.shape(x))


def unpack(packed: tf.Tensor, size: tf.Tensor | int, dtype: tf.DType = tf.bool) -> tf.Tensor:
    """The first `size` elements (rank 1) of a packed mask, as ones and zeros of `dtype`."""
    return _unpacker(dtype)(packed, tf.cast(size, tf.int64))


def pack_bits(flat: tf.Tensor) -> tf.Tensor:
    """`pack` for a boolean tensor of rank 1, inlined into the graph at hand."""
    size = tf.size(flat, out_type=tf.int64)
    flat = tf.pad(flat, [[0, tf.math.floormod(-size, 8)]])
    words = tf.bitcast(tf.reshape(tf.cast(flat, tf.uint8), [-1, 8]), tf.uint64)
    words = words * tf.constant(_GATHER_BITS, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(words, tf.constant(56, tf.uint64)), tf.uint8)


def unpack_bits(packed: tf.Tensor, dtype: tf.DType = tf.bool) -> tf.Tensor:
    """All elements of a packed mask, the filling included, inlined likewise."""
    table = tf.constant(_BITS_OF_BYTE.astype(dtype.as_numpy_dtype))
    return tf.reshape(tf.gather(table, tf.cast(packed, tf.int32)), [-1])


@shared_function(tf.TensorSpec([None], tf.bool))
def _pack(flat: tf.Tensor) -> tf.Tensor:
    return pack_bits(flat)


@functools.cache
def _unpacker(dtype: tf.DType) -> Callable[..., tf.Tensor]:
    @shared_function(tf.TensorSpec([None], tf.uint8), tf.TensorSpec([], tf.int64))
    def unpack(packed: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        return unpack_bits(packed, dtype)[:size]

    return unpack


def nbytes(size: int) -> int:
    """Bytes of a packed mask of `size` elements."""
    return -(-size // 8)
