"""Codecs against NumPy: `packbits` and boolean indexing on the integer bit patterns."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from harness import FLOATS, assert_same_bits, bits, sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from bittrain_tf import native
from bittrain_tf.codecs import bitmap, get_codec, mask, register_codec

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (8,), (9,), (63,), (64,), (65,), (5, 13), (2, 3, 4, 5)]
SPECIAL_BITS = {  # -0.0, subnormals, infinities, NaNs quiet and signalling with payloads
    "float16": [0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E01, 0x7C01, 0xFFFF],
    "bfloat16": [0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF],
    "float32": [1 << 31, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00123, 0x7F800001],
    "float64": [
        1 << 63,
        1,
        (1 << 63) + 5,
        0x7FF << 52,
        0xFFF << 52,
        (0x7FF8 << 48) + 9,
        (2047 << 52) + 1,
    ],
}
CHUNKED = 64  # elements; makes every test tensor of some hundreds one of several chunks


@pytest.fixture(params=[bitmap._CHUNK_SIZE, CHUNKED], ids=["whole", "chunked"])
def chunk_size(request, monkeypatch):
    monkeypatch.setattr(bitmap, "_CHUNK_SIZE", request.param)


@pytest.fixture
def few_elements(monkeypatch):
    """A bitmap codec of TensorFlow operations that holds the int32 range to end at 64 elements."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(bitmap, "_MAX_ELEMENTS", 64)
    bitmap._encoder.cache_clear()
    yield
    bitmap._encoder.cache_clear()


def from_bits(patterns, dtype: str) -> np.ndarray:
    dtype = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.array(patterns, f"u{dtype.itemsize}").view(dtype)


def assert_encodes(x: np.ndarray) -> None:
    packed, *values = get_codec("bitmap").encode(tf.constant(x))
    nonzero = bits(x).ravel() != 0
    np.testing.assert_array_equal(packed, np.packbits(nonzero, bitorder="little"))
    assert_same_bits(np.concatenate(values), x.ravel()[nonzero])


def roundtrip(x: tf.Tensor, support: tf.Tensor | None = None, codec: str = "bitmap") -> tf.Tensor:
    codec = get_codec(codec)
    shape = x.shape if x.shape.is_fully_defined() else tf.shape(x)
    return codec.decode(codec.encode(x, support), shape, x.dtype)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*SHAPES, (1000,), (3, 171)], ids=str)
def test_bitmap_agrees_with_numpy(shape, dtype):
    for density in (0.0, 0.3, 1.0):
        x = sparse(shape, dtype, density)
        assert_encodes(x)
        assert_same_bits(roundtrip(tf.constant(x)), x)


@pytest.mark.parametrize("count", [4, 16])
@pytest.mark.parametrize("size", [0, 1, 64, 255, 256, 257, 300, 1023, 1024, 1025])
def test_any_size_in_any_number_of_chunks(size, count, monkeypatch):
    monkeypatch.setattr(bitmap, "_chunk_count", lambda shape: count)
    x = sparse((size,), seed=size)
    assert_encodes(x)
    assert_same_bits(roundtrip(tf.constant(x)), x)


def test_number_of_chunks_follows_the_static_size(monkeypatch):
    monkeypatch.setattr(bitmap, "_CHUNK_SIZE", CHUNKED)
    sizes = {127: 1, 128: 4, 511: 4, 512: 16, 10**6: 16}
    assert {n: bitmap._chunk_count(tf.TensorShape([n])) for n in sizes} == sizes
    assert bitmap._chunk_count(tf.TensorShape(None)) == 1
    assert bitmap._chunk_count(tf.TensorShape([None, 4])) == 4  # 32 nominal rows


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_keep_their_bits(dtype):
    x = from_bits((SPECIAL_BITS[dtype] + [0, 0]) * 30, dtype)
    assert_encodes(x)
    assert_same_bits(roundtrip(tf.constant(x)), x)
    assert_same_bits(tf.function(roundtrip)(tf.constant(x)), x)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("known", [(None, 13), (None, None), None], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_unknown_dimensions(known, dtype):
    fn = tf.function(roundtrip, input_signature=[tf.TensorSpec(known, dtype)])
    for rows in (0, 1, 5, 40):
        x = sparse((rows, 13), dtype)
        assert_same_bits(fn(tf.constant(x)), x)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 65, 300])
def test_support_replaces_the_bitmap_where_it_is_right(size, dtype):
    x = sparse((size,), dtype)
    right = mask.pack(tf.constant(bits(x) != 0))
    own, support, *values = get_codec("bitmap").encode(tf.constant(x), right)
    assert own.shape == [0]
    np.testing.assert_array_equal(support, right)
    assert_same_bits(np.concatenate(values), x[bits(x) != 0])
    assert_same_bits(roundtrip(tf.constant(x), right), x)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("size", [1, 65, 300])
@pytest.mark.parametrize("wrong_at", [0, -1])
def test_support_that_is_wrong_is_not_used(size, wrong_at):
    x = sparse((size,))
    nonzero = bits(x) != 0
    nonzero[wrong_at] ^= True
    wrong = mask.pack(tf.constant(nonzero))
    own, support, *_ = get_codec("bitmap").encode(tf.constant(x), wrong)
    np.testing.assert_array_equal(own, np.packbits(bits(x) != 0, bitorder="little"))
    np.testing.assert_array_equal(support, wrong)
    for fn in (roundtrip, tf.function(roundtrip)):
        assert_same_bits(fn(tf.constant(x), wrong), x)


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    size=st.integers(0, 700),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
    count=st.sampled_from([1, 4, 16]),
)
def test_any_bit_pattern_comes_back(dtype, size, density, seed, count):
    rng = np.random.default_rng(seed)
    width = tf.as_dtype(dtype).size
    patterns = rng.integers(0, 2 ** (8 * width), size, f"u{width}")
    x = from_bits(patterns * (rng.random(size) < density).astype(patterns.dtype), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bitmap, "_chunk_count", lambda shape: count)
        assert_encodes(x)
        assert_same_bits(roundtrip(tf.constant(x)), x)


@pytest.mark.parametrize("codec", ["bitmap", "dense"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 8, 65, 300])
def test_nbytes_is_what_the_parts_take(codec, dtype, size):
    x = sparse((size,), dtype)
    density = np.count_nonzero(x) / max(size, 1)
    parts = get_codec(codec).encode(tf.constant(x))
    taken = sum(part.numpy().nbytes for part in parts)
    assert get_codec(codec).nbytes(size, tf.as_dtype(dtype), density) == taken


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_keeps_the_tensor_itself(shape, dtype):
    x = tf.constant(sparse(shape, dtype))
    assert roundtrip(x, codec="dense") is x


def test_chunk_beyond_the_int32_range_is_refused(few_elements):
    x = tf.ones([64])
    assert_same_bits(roundtrip(x), x)
    for fn in (roundtrip, tf.function(roundtrip)):
        with pytest.raises(tf.errors.OpError, match=r"more than 1 x 64 elements.*smaller batch"):
            fn(tf.ones([65]))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match=f"bitmap codec takes float16.*not {dtype}"):
        get_codec("bitmap").encode(tf.zeros([3], dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_mask_agrees_with_numpy(shape, graph):
    def through(flags):
        packed = mask.pack(flags)
        return packed, mask.unpack(packed, tf.size(flags))

    for density in (0.0, 0.5, 1.0):
        flags = np.random.default_rng(1).random(shape) < density
        packed, unpacked = (tf.function(through) if graph else through)(tf.constant(flags))
        np.testing.assert_array_equal(packed, np.packbits(flags, bitorder="little"))
        np.testing.assert_array_equal(unpacked, flags.ravel())
        assert len(packed) == mask.nbytes(flags.size)


def test_every_byte_of_a_mask():
    packed = tf.range(256)
    flags = np.unpackbits(np.arange(256, dtype=np.uint8), bitorder="little").astype(bool)
    np.testing.assert_array_equal(mask.pack(tf.constant(flags)), packed)
    np.testing.assert_array_equal(mask.unpack(tf.cast(packed, tf.uint8), 2048), flags)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match=r"'bitmap' is already registered.*another name"):
        register_codec("bitmap")(type("Mine", (), {}))


@pytest.mark.parametrize("name", ["zip", None, 3])
def test_an_unknown_codec_is_refused(name):
    with pytest.raises(ValueError, match=r"Unknown codec.*'bitmap', 'dense'"):
        get_codec(name)
