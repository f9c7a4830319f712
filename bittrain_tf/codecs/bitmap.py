"""The bitmap codec: one bit an element, and the values that are not zero.

BitTrain (arXiv 2110.15362), section 3. A tensor of `n` elements of `b` bytes and
density `d` takes `n / 8 + d * n * b` bytes, so it is smaller than dense as long
as `d < 1 - 1 / (8 b)` (0.969 for float32).

Zero means all bits zero: -0.0, subnormals and NaNs are values like any other.
TensorFlow compares floats with subnormals flushed, so everything here looks at
the bits as integers.

Where the native kernels are available, they do it. What follows does the same with
TensorFlow operations, in chunks, at most `_LANES` of them at a time: partitioning
needs an int32 an element, which for a whole tensor would cost as much as the tensor,
and chunks that stay in the cache are twice as fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from bittrain_tf import native
from bittrain_tf.codecs import mask
from bittrain_tf.codecs.base import register_codec, shared_function

_CHUNK_SIZE = 1 << 20  # elements
_LANES = 2
_NOMINAL_BATCH = 32  # stands for unknown dimensions when the number of chunks is chosen
_MAX_ELEMENTS = 2**31 - 1  # in a chunk: its indices are int32

_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


@register_codec("bitmap")
class BitmapCodec:
    """Bitmap and non-zero values; lossless for every bit pattern."""

    name: str
    lossless = True
    op_sets = ("tensorflow",)

    def encode(self, x: tf.Tensor, support: tf.Tensor | None = None) -> tuple[tf.Tensor, ...]:
        """Encode a float16, bfloat16, float32 or float64 tensor.

        Returns:
            `(bitmap, *values)`: uint8 and, a chunk each (one, where native), the non-zeros
            in order; with `support`, `(own, support, *values)` where `own` is empty if `support` is
            the bitmap, as it nearly always is, and the bitmap otherwise.
        """
        if x.dtype not in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
            raise TypeError(
                "The bitmap codec takes float16, bfloat16, float32 and float64 tensors, "
                f"not {x.dtype.name}."
            )
        if native.available():
            bitmap, values = native.encode(x, support)
            return (bitmap, values) if support is None else (bitmap, support, values)
        encode = _encoder(x.dtype, _chunk_count(x.shape), support is not None)
        arguments = [tf.reshape(x, [-1])] + ([] if support is None else [support])
        return tuple(encode(*arguments))

    def decode(
        self, parts: Sequence[tf.Tensor], shape: tf.TensorShape | tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor:
        if native.available():
            *bitmaps, values = parts
            return native.decode(tf.cast(shape, tf.int64), values, bitmaps)
        supported = parts[1].dtype == tf.uint8
        decode = _decoder(dtype, len(parts) - (2 if supported else 1), supported)
        dims = tf.cast(shape, tf.int64)
        return tf.reshape(decode(tf.reduce_prod(dims), *parts), dims)

    def nbytes(self, size: int, dtype: tf.DType, density: float) -> int:
        return mask.nbytes(size) + round(size * density) * dtype.size


def _chunk_count(shape: tf.TensorShape) -> int:
    """How many chunks, from the static shape: a graph cannot grow with its data.

    1, 4 or 16, so that a model needs few different encoders.
    """
    if shape.rank is None:
        return 1
    size = math.prod(_NOMINAL_BATCH if d is None else d for d in shape.as_list())
    return 1 if size < 2 * _CHUNK_SIZE else 4 if size < 8 * _CHUNK_SIZE else 16


def _chunk_length(size: tf.Tensor, count: int) -> tf.Tensor:
    """Elements of every chunk but the last, in whole bytes of bitmap (and aligned slices)."""
    return -(-size // (64 * count)) * 64


def _checked(length: tf.Tensor, count: int) -> tf.Tensor:
    """`length`, once it is known that a chunk's indices fit an int32.

    Not by an assertion: that would make the encoder stateful, and TensorFlow runs
    stateful functions one after another. Converting a text that is no number fails too.
    """
    complaint = (
        f"not encoded: a tensor of more than {count} x {_MAX_ELEMENTS} elements cannot be kept "
        "as a bitmap; use a smaller batch, or leave the layer out with compress(filters=...)"
    )
    return length + tf.strings.to_number(
        tf.where(length <= _MAX_ELEMENTS, "0", complaint), tf.int64
    )


def _slice(flat: tf.Tensor, i: int, length: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    return flat[tf.minimum(i * length, size) : tf.minimum((i + 1) * length, size)]


@functools.cache
def _encoder(dtype: tf.DType, count: int, supported: bool) -> Callable[..., list[tf.Tensor]]:
    """Encodes a tensor of rank 1 in `count` chunks."""
    packed = tf.TensorSpec([None], tf.uint8)

    @shared_function(tf.TensorSpec([None], dtype), *([packed] if supported else []))
    def encode(flat: tf.Tensor, *support: tf.Tensor) -> list[tf.Tensor]:
        size = tf.size(flat, out_type=tf.int64)
        length = _checked(_chunk_length(size, count), count)
        bitmaps: list[tf.Tensor] = []
        values: list[tf.Tensor] = []
        for i in range(count):
            with tf.control_dependencies(values[max(0, i - _LANES) : max(0, i - _LANES + 1)]):
                bits = tf.bitcast(_slice(flat, i, length, size), _BITS[dtype.size])
            nonzero = tf.not_equal(bits, tf.zeros([], bits.dtype))
            bitmaps.append(mask.pack_bits(nonzero))
            kept = tf.dynamic_partition(bits, tf.cast(nonzero, tf.int32), 2)[1]
            values.append(tf.bitcast(kept, dtype))
        bitmap = tf.concat(bitmaps, 0)
        if not supported:
            return [bitmap, *values]
        differs = tf.reduce_any(tf.not_equal(bitmap, support[0]))
        own = bitmap[: tf.size(bitmap, out_type=tf.int64) * tf.cast(differs, tf.int64)]
        return [own, support[0], *values]

    return encode


@functools.cache
def _decoder(dtype: tf.DType, count: int, supported: bool) -> Callable[..., tf.Tensor]:
    """Decodes what the like `_encoder` made: `(size, *parts)` to a tensor of rank 1."""
    packed = tf.TensorSpec([None], tf.uint8)

    @shared_function(
        tf.TensorSpec([], tf.int64),
        *([packed] * (2 if supported else 1)),
        *([tf.TensorSpec([None], dtype)] * count),
    )
    def decode(size: tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
        if supported:
            own, support, *values = parts
            bitmap = tf.concat([own, support[tf.size(own) :]], 0)
        else:
            bitmap, *values = parts
        length = _chunk_length(size, count)
        if count == 1:
            return _decode_chunk(bitmap, values[0], length)[:size]
        # Written into one buffer in place: joining the chunks would hold the tensor twice.
        # tf.zeros would do, but TensorFlow then keeps its buffer from one step to the next.
        rows = tf.raw_ops.Empty(shape=tf.stack([count, tf.cast(length, tf.int32)]), dtype=dtype)
        written = [rows]
        size_in_bytes = tf.size(bitmap, out_type=tf.int64)
        for i, chunk_values in enumerate(values):
            with tf.control_dependencies([written[max(0, i + 1 - _LANES)]]):
                chunk_bitmap = _slice(bitmap, i, length // 8, size_in_bytes)
            chunk = _decode_chunk(chunk_bitmap, chunk_values, length)
            rows = tf.raw_ops.InplaceUpdate(x=rows, i=[i], v=chunk[None])
            written.append(rows)
        return tf.reshape(rows, [-1])[:size]

    return decode


def _decode_chunk(bitmap: tf.Tensor, values: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    bits = _BITS[values.dtype.size]
    length = tf.cast(length, tf.int32)
    size = tf.size(bitmap) * 8
    nonzero = mask.unpack_bits(bitmap)
    indices = tf.dynamic_partition(tf.range(size), tf.cast(nonzero, tf.int32), 2)[1]
    chunk = tf.raw_ops.SparseToDense(
        sparse_indices=indices,
        output_shape=length[None],
        sparse_values=tf.bitcast(values, bits),
        default_value=tf.zeros([], bits),
        validate_indices=False,
    )
    return tf.bitcast(chunk, values.dtype)
