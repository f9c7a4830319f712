"""The native kernels: against NumPy and TensorFlow, and with arguments that do not fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import FLOATS, assert_same_bits, bits, sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import bittrain_tf as bt
from bittrain_tf import native
from bittrain_tf.backward.normalization import batch_norm_gradient
from bittrain_tf.backward.pooling import max_pool_gradient

pytestmark = pytest.mark.skipif(not native.available(), reason=native.native().detail)

# From one element to several shards; whole blocks and rests.
SIZES = (0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 300_001)
SPECIAL = {
    "float16": [0x8000, 0x0001, 0x03FF, 0x7C00, 0xFC00, 0x7E01, 0xFC01],
    "bfloat16": [0x8000, 0x0001, 0x007F, 0x7F80, 0xFF80, 0x7FC1, 0xFF81],
    "float32": [0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF800001],
    "float64": [1 << 63, 1, 2**52 - 1, 0x7FF << 52, 0xFFF << 52, (0x7FF8 << 48) + 1],
}


def packed(flags) -> np.ndarray:
    return np.packbits(np.ravel(flags), bitorder="little")


def with_special(size: int, dtype: str, density: float, seed: int = 0) -> np.ndarray:
    """Sparse values, some of them replaced by what floats have that is neither."""
    x = sparse([size], dtype, density, seed)
    patterns = np.array(SPECIAL[dtype], bits(x).dtype)
    where = np.random.default_rng(seed + 1).integers(0, max(size, 1), min(size, 20))
    x.view(patterns.dtype)[where] = np.resize(patterns, len(where))
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_encode_and_decode_agree_with_numpy(size, dtype):
    for density in (0.0, 0.3, 1.0):
        x = with_special(size, dtype, density)
        nonzero = bits(x) != 0
        bitmap, values = native.encode(tf.constant(x))
        assert_same_bits(bitmap, packed(nonzero))
        assert_same_bits(values, x[nonzero])
        shape = tf.constant([size], tf.int64)
        assert_same_bits(native.decode(shape, values, [bitmap]), x)
        own, same = native.encode(tf.constant(x), bitmap)
        assert own.shape == [0]
        assert_same_bits(same, values)
        assert_same_bits(native.decode(shape, values, [own, bitmap]), x)
        if size:
            wrong = tf.bitwise.invert(bitmap)[:-1]
            wrong = tf.concat([wrong, bitmap[-1:]], 0)
            own, same = native.encode(tf.constant(x), wrong)
            assert_same_bits(same, values)
            kept = own if len(own) else wrong
            assert_same_bits(kept, bitmap)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_encode_and_decode_any_shape(data):
    dtype = data.draw(st.sampled_from(FLOATS))
    shape = data.draw(st.lists(st.integers(0, 40), max_size=4))
    x = with_special(int(np.prod(shape)), dtype, data.draw(st.floats(0, 1)), 3).reshape(shape)
    bitmap, values = native.encode(tf.constant(x))
    decoded = native.decode(tf.constant(shape, tf.int64), values, [bitmap])
    assert decoded.shape == shape
    assert_same_bits(decoded, x)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_corrupted_parts_are_refused(data):
    """Any change to the parts is an error, never a read beyond them."""
    size = data.draw(st.integers(1, 3000))
    x = tf.constant(sparse([size], "float32", data.draw(st.floats(0, 1)), 5))
    bitmap, values = (part.numpy() for part in native.encode(x))
    shape = [size]
    what = data.draw(st.sampled_from(["bit", "values", "bitmap", "shape", "rank", "negative"]))
    if what == "bit":
        place = data.draw(st.integers(0, 8 * len(bitmap) - 1))
        bitmap[place // 8] ^= 1 << place % 8
    elif what == "values":
        change = data.draw(st.sampled_from([-1, 1, 1000]))
        values = np.resize(np.append(values, 1).astype("float32"), max(0, len(values) + change))
        if len(values) == native.encode(x)[1].shape[0]:
            return
    elif what == "bitmap":
        bitmap = np.append(bitmap, np.uint8(0)) if data.draw(st.booleans()) else bitmap[:-1]
    elif what == "shape":
        shape = [size + 8 * data.draw(st.integers(1, 2**40))]
    elif what == "rank":
        values = values[None]
    else:
        shape = [-size]
    with pytest.raises(tf.errors.InvalidArgumentError):
        native.decode(tf.constant(shape, tf.int64), tf.constant(values), [tf.constant(bitmap)])


def test_too_many_elements_are_refused():
    parts = [tf.zeros([0], tf.uint8)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too many elements"):
        native.decode(tf.constant([2**40, 2**40], tf.int64), tf.zeros([0]), parts)


@pytest.mark.parametrize(
    "wrong", [np.zeros(2, "uint8"), np.zeros((1, 1), "uint8"), np.full(1, 255, "uint8")], ids=str
)
def test_masks_that_do_not_fit_are_refused(wrong):
    x, mask = tf.ones([5]), tf.constant(wrong)
    rows, vector = tf.ones([1, 5]), tf.ones([5])
    for use in (
        lambda: native.encode(x, mask),
        lambda: native.multiply(x, mask),
        lambda: native.choose(x, mask, on=1.0, off=0.0),
        lambda: native.normalize_gradient(rows, mask, rows, vector, vector, vector),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 1|bits set beyond"):
            use()


def test_other_arguments_that_do_not_fit_are_refused():
    x, vector, mask = tf.ones([2, 5]), tf.ones([5]), tf.zeros([2], tf.uint8)
    for use, match in (
        (lambda: native.normalize(x, tf.ones([4]), vector), r"scale of shape \[5\]"),
        (lambda: native.normalize(x, vector, tf.ones([4])), r"offset of shape \[5\]"),
        (lambda: native.normalize(tf.ones([]), vector, vector), "no axis of channels"),
        (
            lambda: native.normalize_gradient(x[:1], None, x, vector, vector, vector),
            "one shape",
        ),
        (
            lambda: native.normalize_gradient(x, mask, x, vector, vector[:3], vector),
            r"inv_std of shape \[5\]",
        ),
        (lambda: native.max_pool(tf.ones([1, 5, 4, 8]), (2, 2)), "multiples of 2 and 2"),
        (lambda: native.max_pool(tf.ones([1, 4, 4, 7]), (2, 2)), "channels of 8"),
        (lambda: native.max_pool_gradient(tf.ones([1, 2, 2, 8]), mask, (2, 2)), "mask of rank"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            use()


def test_static_shapes():
    x = keras.Input((6, 8), batch_size=3)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 6, 8]), tf.TensorSpec([3, 7])])
    def shapes(x, y):
        bitmap, values = native.encode(y)
        assert bitmap.shape == [3]
        assert values.shape.as_list() == [None]
        assert native.encode(x)[0].shape.as_list() == [None]
        assert native.decode(tf.zeros([4], tf.int64), values, [bitmap]).shape.rank == 4
        mask = native.mark_positive(x)
        assert mask.shape.as_list() == [None]
        assert native.multiply(x, mask).shape.as_list() == [None, 4, 6, 8]
        pooled, mask = native.max_pool(x, (2, 3))
        assert pooled.shape.as_list() == [None, 2, 2, 8]
        channels = tf.ones([8])
        assert native.normalize(x, channels, channels).shape.as_list() == [None, 4, 6, 8]
        gradients = native.normalize_gradient(x, None, x, channels, channels, channels)
        assert [g.shape.as_list() for g in gradients] == [[None, 4, 6, 8], [8], [8]]
        with pytest.raises(ValueError, match="rank"):
            native.multiply(x, mask[None])

    shapes.get_concrete_function()
    assert x.shape == (3, 6, 8)


@pytest.mark.parametrize("dtype", FLOATS)
def test_marks_are_those_of_tensorflow(dtype):
    """Subnormals and NaNs too: TensorFlow's comparisons take the former for zero, or not."""
    for size in SIZES:
        x = tf.constant(with_special(size, dtype, 0.5) * 8)
        for graph in (False, True):
            marks = lambda x: (x > 0, (x > 0) & (x < 6))  # noqa: E731
            own = lambda x: (native.mark_positive(x), native.mark_positive(x, below_six=True))  # noqa: E731
            expected = (tf.function(marks) if graph else marks)(x)
            for mine, theirs in zip((tf.function(own) if graph else own)(x), expected, strict=True):
                np.testing.assert_array_equal(mine, packed(theirs))
            flags = expected[0]
            np.testing.assert_array_equal(native.mark_true(flags), packed(flags))


@pytest.mark.parametrize("dtype", FLOATS)
def test_multiply_is_a_product(dtype):
    for size in SIZES:
        dy = with_special(size, dtype, 0.9)
        subnormal = np.abs(np.float64(dy)) < np.finfo(np.float32).tiny  # flushed or not
        dy[subnormal] = 0
        flags = np.random.default_rng(2).random(size) < 0.5
        product = native.multiply(tf.constant(dy), tf.constant(packed(flags))).numpy()
        expected = (tf.constant(dy) * tf.cast(tf.constant(flags), dtype)).numpy()
        nan = np.isnan(np.float64(expected))
        np.testing.assert_array_equal(np.isnan(np.float64(product)), nan)
        assert_same_bits(product[~nan], expected[~nan])


def test_choose_is_a_selection():
    for size in SIZES:
        dy = with_special(size, "float32", 0.9)
        flags = np.random.default_rng(2).random(size) < 0.5
        mask = tf.constant(packed(flags))
        for on, off in ((1.0, 0.0), (1.25, 0.0), (1.0, 0.2)):
            chosen = native.choose(tf.constant(dy), mask, on=on, off=off)
            unmarked = tf.constant(dy) * off if off else tf.zeros([size])
            np.testing.assert_array_equal(
                chosen, tf.where(tf.constant(flags), tf.constant(dy) * on, unmarked)
            )


SHAPES = [(4, 5, 3), (2, 9, 9, 24), (3, 1, 700), (40_000, 16), (0, 4), (1, 2050)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("limit", [np.inf, 6.0])
def test_normalize_has_the_bits_of_tensorflow(shape, limit):
    rng = np.random.default_rng(0)
    x = tf.constant(rng.standard_normal(shape) * 5, tf.float32)
    scale, offset = (tf.constant(rng.standard_normal(shape[-1:]), tf.float32) for _ in range(2))
    y = x * scale + offset
    assert_same_bits(native.normalize(x, scale, offset), y)
    rectified, mask = native.normalize_and_rectify(x, scale, offset, limit=limit, marked=True)
    np.testing.assert_array_equal(rectified, tf.minimum(tf.nn.relu(y), limit))
    np.testing.assert_array_equal(mask, packed((y > 0) & (y < limit)))
    unmarked, empty = native.normalize_and_rectify(x, scale, offset, limit=limit, marked=False)
    assert_same_bits(unmarked, rectified)
    assert empty.shape == [0]


def test_normalize_passes_nans_on():
    x = tf.constant([[np.nan, 1.0, -1.0, np.inf]])
    one, zero = tf.ones([4]), tf.zeros([4])
    y, mask = native.normalize_and_rectify(x, one, zero, limit=6.0, marked=True)
    np.testing.assert_array_equal(y, [[np.nan, 1, 0, 6]])
    np.testing.assert_array_equal(mask, [0b0010])


@pytest.mark.parametrize("shape", SHAPES[:4] + SHAPES[5:], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_normalize_gradient_is_within_its_rounding(shape, masked):
    """Against float64.

    A sum carries an error of at most 36 epsilons of its terms' magnitudes: up to 32 of them are
    added in float32 before they go into float64, and at most four roundings come on top.
    """
    rng = np.random.default_rng(0)
    dy, x = (tf.constant(rng.standard_normal(shape), tf.float32) for _ in range(2))
    axes = list(range(len(shape) - 1))
    mean, variance = tf.nn.moments(x, axes)
    gamma = tf.constant(rng.random(shape[-1]) + 0.5, tf.float32)
    inv_std = tf.math.rsqrt(variance + 1e-3)
    flags = rng.random(shape) < 0.5
    mask = tf.constant(packed(flags)) if masked else None
    found = native.normalize_gradient(dy, mask, x, mean, inv_std, gamma * inv_std)
    found = [t.numpy() for t in found]
    g = tf.cast(dy, tf.float64) * (flags if masked else 1.0)
    wide = [tf.cast(t, tf.float64) for t in (x, mean, variance, gamma)]
    dx, dgamma, dbeta = batch_norm_gradient(g, *wide, -1, 1e-3)
    epsilon = 36 * np.finfo(np.float32).eps
    centred = np.abs(wide[0] - wide[1])
    magnitude = tf.reduce_sum(np.abs(g), axes)
    weighted = tf.reduce_sum(np.abs(g) * centred, axes) * tf.cast(inv_std, tf.float64)
    assert np.all(np.abs(found[2] - dbeta) <= epsilon * magnitude)
    assert np.all(np.abs(found[1] - dgamma) <= epsilon * weighted)
    count = np.prod(shape[:-1])
    std = tf.cast(inv_std, tf.float64)
    terms = np.abs(g) + (centred * std * weighted + magnitude) / count
    assert np.all(np.abs(found[0] - dx) <= epsilon * terms * wide[3] * std)


def test_gradients_do_not_depend_on_the_number_of_threads(monkeypatch):
    rng = np.random.default_rng(0)
    dy, x = (tf.constant(rng.standard_normal((20_000, 24)), tf.float32) for _ in range(2))
    vector = tf.constant(rng.random(24), tf.float32)
    mask = native.mark_positive(x)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(native.kernels, "threads", lambda threads=threads: threads)
        found.append(native.normalize_gradient(dy, mask, x, vector, vector, vector))
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            assert_same_bits(mine, theirs)


@pytest.mark.parametrize("pool_size", [(2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("channels", [8, 24, 128])
def test_max_pooling_is_that_of_tensorflow(pool_size, channels):
    # Small integers, for ties.
    x = np.random.default_rng(0).integers(-2, 3, (3, 12, 8, channels)).astype("float32")
    x = tf.constant(x)
    y, mask = native.max_pool(x, pool_size)
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = tf.nn.max_pool2d(x, pool_size, pool_size, "VALID")
    assert_same_bits(y, expected)
    dy = tf.constant(np.random.default_rng(1).standard_normal(y.shape), tf.float32)
    dx = native.max_pool_gradient(dy, mask, pool_size)
    np.testing.assert_array_equal(dx, tape.gradient(expected, x, output_gradients=dy))
    selected = np.unpackbits(mask.numpy(), bitorder="little").reshape(x.shape).astype(bool)
    np.testing.assert_array_equal(
        dx, max_pool_gradient(dy, tf.constant(selected), pool_size, "valid")
    )


def test_a_buffer_others_need_is_not_written_to():
    """Gradients are computed in place, but only of tensors nobody else reads."""

    @tf.function
    def run(x):
        dy = x * 2.0
        mask = native.mark_positive(x)
        one = tf.ones([16])
        first = native.multiply(dy, mask)
        second = native.choose(dy, mask, on=3.0, off=0.5)
        third, _, _ = native.normalize_gradient(dy, mask, dy, one, one, one)
        return dy, first, second, third, x

    x = np.random.default_rng(0).standard_normal((4000, 16)).astype("float32")
    dy, first, second, third, after = run(tf.constant(x))
    assert_same_bits(after, x)
    assert_same_bits(dy, 2 * x)
    assert_same_bits(first, 2 * x * (x > 0))
    np.testing.assert_array_equal(second, np.where(x > 0, 6 * x, x))
    alone = native.normalize_gradient(
        tf.constant(2 * x), native.mark_positive(tf.constant(x)), tf.constant(2 * x),
        *[tf.ones([16])] * 3,
    )[0]  # fmt: skip
    assert_same_bits(third, alone)


def test_batch_normalization_and_rectifier_are_one_operation():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    model = bt.compress(keras.Model(inputs, keras.layers.Conv2D(4, 3)(x)))

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    graph = gradients.get_concrete_function(tf.TensorSpec([4, 8, 8, 3])).graph
    kinds = [op.type for op in graph.get_operations() if op.type.startswith("Bittrain>")]
    # Forward, and once more for the second convolution's gradient.
    assert sorted(kinds) == ["Bittrain>Normalize"] * 2 + ["Bittrain>NormalizeGradient"]


@pytest.mark.parametrize("limit", [None, 6])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_normalized_batch_read_by_a_rectifier_and_by_others(graph, limit):
    """The rectifier takes over from the normalization; its other readers keep theirs."""
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3)(inputs))
    joined = keras.layers.Add()([keras.layers.ReLU(max_value=limit)(x), x])
    stock = keras.Model(inputs, keras.layers.Conv2D(4, 3)(joined))
    compressed = keras.models.clone_model(stock)
    compressed.set_weights(stock.get_weights())
    bt.compress(compressed)
    images = tf.constant(np.random.default_rng(0).standard_normal((4, 8, 8, 3)), tf.float32)

    def gradients(model):
        with tf.GradientTape() as tape:
            y = model(images, training=True)
            loss = tf.reduce_sum(y**2)
        return [y, *tape.gradient(loss, model.trainable_variables)]

    run = tf.function(gradients) if graph else gradients
    for mine, theirs in zip(run(compressed), run(stock), strict=True):
        scale = np.abs(theirs).max()
        # Sums of up to 144 terms of that size, and what cancels in them: the gradient of a
        # bias before a normalization is nothing but rounding.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4 * max(scale, 1))
