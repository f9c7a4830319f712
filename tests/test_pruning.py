"""Pruned activations: thresholds, the layers' outputs and gradients, and what they keep."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import bittrain_tf as bt
from bittrain_tf.layers.pruned import attach
from bittrain_tf.pruning import state
from bittrain_tf.pruning.quantile import CHANNEL, LAYER, SAMPLE, like, magnitudes, quantile
from bittrain_tf.pruning.state import FORWARD, SAVED, Pruning

STEP = tf.constant(0, tf.int64)


def _normal(shape, seed=0) -> tf.Tensor:
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def _pruned(layer, mode, target, shape, per=LAYER, x=None):
    """A layer, compressed and pruned; with thresholds learnt from `x`, if given."""
    layer.build((None, *shape))
    model = keras.Sequential([keras.Input(shape), layer])
    bt.compress(model, filters=lambda _: True)
    pruning = Pruning(mode=mode, target_sparsity=target, begin=0, ramp=0, per=per)
    attach(layer, pruning)
    if x is not None:
        with tf.GradientTape():
            layer(x, training=True)
    return layer


def _gradients(fn, *inputs):
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = fn(*inputs)
    dy = _normal(y.shape, seed=9)
    return y, tape.gradient(y, inputs, output_gradients=dy)


# Thresholds


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("per", [LAYER, CHANNEL, SAMPLE])
def test_thresholds_reach_the_share(share, per):
    x = _normal((16, 24, 24, 32)) * tf.range(1.0, 33.0)
    found = magnitudes(x, STEP, per)
    threshold = like(quantile(found, share), x, per)
    zeros = np.mean(np.abs(x) <= threshold)
    # Of `count` elements looked at for each threshold, five standard deviations.
    count = found.shape[0]
    assert abs(zeros - share) <= 5 * np.sqrt(max(share * (1 - share), 1e-9) / count) + 1 / count


def test_thresholds_of_each_channel_and_of_each_sample():
    x = _normal((8, 12, 12, 16)) * tf.range(1.0, 17.0)
    by_channel = quantile(magnitudes(x, STEP, CHANNEL), 0.5).numpy()
    assert np.all(np.abs(np.mean(np.abs(x) <= by_channel, (0, 1, 2)) - 0.5) < 0.1)
    x = _normal((8, 12, 12, 16)) * tf.reshape(tf.range(1.0, 9.0), [8, 1, 1, 1])
    by_sample = like(quantile(magnitudes(x, STEP, SAMPLE), 0.5), x, SAMPLE)
    assert np.all(np.abs(np.mean(np.abs(x) <= by_sample, (1, 2, 3)) - 0.5) < 0.1)


def test_a_stride_that_divides_the_channels_is_no_trouble():
    # One channel in 64 is large; every 64-th element would be of one channel.
    x = np.zeros((32, 32, 32, 64), "float32")
    x[..., 0] = 1.0
    seen = magnitudes(tf.constant(x), STEP, LAYER)
    assert 0.005 < float(tf.reduce_mean(seen)) < 0.03
    # Nor is it those that lie next to each other: here, of one sample in 64.
    seen = magnitudes(tf.constant(np.moveaxis(x, -1, 0)), STEP, LAYER)
    assert 0.005 < float(tf.reduce_mean(seen)) < 0.03


def test_small_tensors_are_looked_at_whole():
    x = tf.constant([[3.0, -1.0, 2.0, -4.0]])
    found = magnitudes(x, STEP, LAYER)
    assert sorted(found.numpy().ravel()) == [1, 2, 3, 4]
    assert float(quantile(found, 0.5)[0]) == 2
    assert float(quantile(found, 0.0)[0]) == 0


def test_other_elements_at_each_step():
    x = tf.reshape(tf.range(1e5), [10, -1])
    seen = [set(magnitudes(x, tf.constant(s, tf.int64), LAYER).numpy().ravel()) for s in (0, 1)]
    assert not seen[0] & seen[1]


def test_nothing_to_look_at():
    found = magnitudes(tf.zeros((0, 4)), STEP, LAYER)
    assert float(quantile(found, 0.7)[0]) == 0


def test_the_share_rises_as_the_schedule_says():
    pruning = Pruning(mode=SAVED, target_sparsity=0.8, begin=10, ramp=20, per=LAYER)
    at = {step: float(pruning._share(tf.constant(step, tf.int64))) for step in (0, 9, 10, 20, 30)}
    assert at[0] == at[9] == at[10] == 0
    assert at[20] == pytest.approx(0.8 * (1 - 0.5**3))
    assert at[30] == float(pruning._share(tf.constant(999, tf.int64))) == pytest.approx(0.8)


# Outputs


def _without(y, threshold):
    return tf.where(tf.abs(y) <= threshold, tf.zeros([], y.dtype), y)


OUTPUTS = {
    "conv_relu": lambda: layers.Conv2D(16, 3, padding="same", activation="relu"),
    "conv_relu6": lambda: layers.Conv2D(16, 3, activation="relu6"),
    "relu": lambda: layers.ReLU(),
    "relu6": lambda: layers.ReLU(max_value=6),
    "relu_max": lambda: layers.ReLU(max_value=1.5),
    "activation": lambda: layers.Activation("relu"),
    "dense_relu": lambda: layers.Dense(16, activation="relu"),
    "dense_gelu": lambda: layers.Dense(16, activation="gelu"),
    "conv": lambda: layers.Conv2D(16, 3),
    "hard_sigmoid": lambda: layers.Dense(16, activation="hard_sigmoid"),
    "layer_norm": lambda: layers.LayerNormalization(),
    "pooled": lambda: layers.MaxPooling2D(),
}


@pytest.mark.parametrize("per", [LAYER, CHANNEL])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("make", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_are_pruned_and_gradients_exact(make, traced, per, backend, monkeypatch):
    x = _normal((8, 6, 6, 8))
    layer = _pruned(make(), FORWARD, 0.7, x.shape[1:], per, x)
    thresholds = layer.activation_pruning.thresholds
    assert np.all(thresholds.numpy() >= 0)
    assert np.any(thresholds.numpy() > 0)
    # Fixed, and between two values: graphs and eager operations round in different ways.
    monkeypatch.setattr(state, "_RATE", 0.0)
    thresholds.assign(thresholds * (1 + 2**-18))
    threshold = thresholds.numpy() if per == CHANNEL else thresholds.numpy()[0]
    weights = [v.value for v in layer.trainable_variables]
    run = tf.function(lambda x: layer(x)) if traced else layer
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(x)
    dy = _normal(y.shape, 9)
    actual = tape.gradient(y, [x, *weights], output_gradients=dy)
    np.testing.assert_allclose(layer(x), y, rtol=1e-6)  # in inference as in training
    bt.restore(keras.Sequential([layer]))
    with tf.GradientTape() as tape:
        tape.watch(x)
        stock = _without(layer(x), threshold)
    expected = tape.gradient(stock, [x, *weights], output_gradients=dy)
    np.testing.assert_allclose(y, stock, rtol=1e-5, atol=1e-6)
    for a, e in zip(actual, expected, strict=True):
        scale = float(tf.reduce_max(tf.abs(e))) or 1.0
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * scale)
    wanted = max(0.7, float(np.mean(layer(x) == 0)))
    assert np.mean(y == 0) == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_masked_before_and_after_batch_normalization(traced, backend):
    x = _normal((8, 6, 6, 8)) + 0.3
    layer = layers.BatchNormalization(
        beta_initializer="random_normal", gamma_initializer="random_normal"
    )
    _pruned(layer, FORWARD, 0.7, x.shape[1:], x=x)
    weights = [layer.gamma.value, layer.beta.value]
    run = tf.function(lambda x: layer(x, training=True)) if traced else layer
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = run(x) if traced else run(x, training=True)
    dy = _normal(y.shape, 9)
    actual = tape.gradient(y, [x, *weights], output_gradients=dy)
    threshold = layer.activation_pruning.thresholds.numpy()[0]
    inferred = layer(x, training=False)
    bt.restore(keras.Sequential([layer]))

    def reference(training):
        left = _without(x, threshold)
        return tf.where(left == 0, 0.0, layer(left, training=training))

    np.testing.assert_allclose(inferred, reference(False), rtol=1e-5, atol=1e-5)
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected_y = reference(True)
    np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-5)
    assert np.mean(y == 0) == pytest.approx(0.7, abs=0.02)
    for a, e in zip(actual, tape.gradient(expected_y, [x, *weights], dy), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4)


def test_a_nan_is_not_pruned_away_nor_learnt():
    x = _normal((4, 10))
    layer = _pruned(layers.Dense(10, activation="relu"), FORWARD, 0.7, (10,), x=x)
    before = layer.activation_pruning.thresholds.numpy()
    for broken in (tf.tensor_scatter_nd_update(x, [[0, 0]], [np.nan]), x * np.nan):
        with tf.GradientTape():
            y = layer(broken)
        assert np.isnan(y.numpy()).any()
    assert np.all(np.isfinite(layer.activation_pruning.thresholds.numpy()))
    assert np.all(before > 0)


def _kept_share(model, x, y, name):
    """Bytes kept for one layer's output, as a share of the dense output's."""
    analysis = bt.analyze(model, x, y)
    dense = np.prod(model.get_layer(name).output.shape[1:]) * len(x) * 4
    return sum(row.bytes for row in analysis.rows if row.source == name) / dense


@pytest.mark.parametrize(("target", "bound"), [(0.5, 0.54), (0.7, 0.34), (0.9, 0.14)])
def test_what_is_kept_of_pruned_outputs(target, bound):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 8)),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="pruned"),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="last"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = _normal((16, 16, 16, 8)).numpy(), np.arange(16) % 3
    bt.compress(model)
    pruning = bt.ActivationPruning(target, ramp=0, verbose=0)
    model.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=[pruning])
    # One bitmap, which is the mask of the gradient as well, and the values.
    assert _kept_share(model, x, y, "pruned") <= bound


# What is kept


KEPT = {
    "dense": (lambda: layers.Dense(16), (6, 8)),
    "dense_gelu": (lambda: layers.Dense(16, activation="gelu"), (8,)),
    "conv": (lambda: layers.Conv2D(16, 3), (6, 6, 8)),
    "separable": (lambda: layers.SeparableConv2D(16, 3), (6, 6, 8)),
    "batch_norm": (lambda: layers.BatchNormalization(), (6, 6, 8)),
    "layer_norm": (
        lambda: layers.LayerNormalization(
            gamma_initializer="random_normal", beta_initializer="random_normal"
        ),
        (6, 8),
    ),
    "layer_norm_axes": (
        lambda: layers.LayerNormalization(axis=[1, 2], scale=False, epsilon=0.1),
        (6, 8),
    ),
    "rms_norm": (lambda: layers.RMSNormalization(), (6, 8)),
    "group_norm": (lambda: layers.GroupNormalization(4), (6, 6, 8)),
    "silu": (lambda: layers.Activation("silu"), (6, 8)),
    "prelu": (lambda: layers.PReLU(alpha_initializer="random_normal"), (6, 8)),
    "attention": (lambda: _SelfAttention(), (6, 8)),
}


class _SelfAttention(keras.Model):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")

    def call(self, x):
        return self.attention(x, x)


def _whole(make, shape, target, per=LAYER):
    """A model of one layer after another, so that what it reads has been made by a layer."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape), layers.Dense(shape[-1]), make()])
    if target is None:
        return model
    bt.compress(model)
    callback = bt.ActivationPruning(target, mode="saved", per=per, verbose=0)
    callback.set_model(model)
    return model


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("make", "shape"), KEPT.values(), ids=KEPT.keys())
def test_with_nothing_to_prune_gradients_are_exact(make, shape, traced):
    x = _normal((8, *shape)) + 0.5
    results = []
    for target in (None, 0.0):
        model = _whole(make, shape, target)
        run = tf.function(lambda x, m=model: m(x, training=True)) if traced else model
        with tf.GradientTape() as tape:
            y = run(x) if traced else run(x, training=True)
        dy = _normal(y.shape, 9)
        results.append((y, tape.gradient(y, [v.value for v in model.trainable_variables], dy)))
    (y0, g0), (y1, g1) = results
    np.testing.assert_allclose(y1, y0, rtol=1e-6, atol=1e-6)
    for a, e in zip(g1, g0, strict=True):
        if e is None:
            assert a is None
            continue
        # A bias before a normalization has a gradient of rounding errors alone.
        scale = max(float(tf.reduce_max(tf.abs(e))), 1.0)
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=2e-5 * scale)


@pytest.mark.parametrize("per", [LAYER, CHANNEL, SAMPLE])
@pytest.mark.parametrize(("make", "shape"), KEPT.values(), ids=KEPT.keys())
def test_outputs_stay_and_gradients_do_not(make, shape, per):
    x = _normal((8, *shape)) + 0.5
    stock, model = _whole(make, shape, None), _whole(make, shape, 0.9, per)
    both = []
    for each in (stock, model):
        with tf.GradientTape() as tape:
            y = tf.function(lambda x, m=each: m(x, training=True))(x)
        both.append((y, tape.gradient(y, [v.value for v in each.trainable_variables], y)))
    (y0, g0), (y1, g1) = both
    np.testing.assert_allclose(y1, y0, rtol=1e-6, atol=1e-6)
    assert all((a is None) == (b is None) for a, b in zip(g0, g1, strict=True))
    exact = (layers.GroupNormalization,)  # of all of them the one that is never pruned
    same = all(np.allclose(a, b, rtol=1e-3) for a, b in zip(g0, g1, strict=True) if a is not None)
    assert same == isinstance(model.layers[-1], exact)


def test_the_gradient_is_that_of_the_largest_elements():
    x = _normal((32, 20))
    model = _whole(lambda: layers.Dense(7), (20,), 0.9)
    first, second = model.layers
    with tf.GradientTape() as tape:
        y = model(x)
    dy = _normal(y.shape, 9)
    kernel, bias = tape.gradient(y, [second.kernel.value, second.bias.value], dy)
    hidden = first(x).numpy()
    threshold = np.sort(np.abs(hidden).ravel())[int(np.ceil(0.9 * hidden.size)) - 1]
    largest = np.where(np.abs(hidden) <= threshold, 0, hidden)
    assert np.mean(largest == 0) == pytest.approx(0.9, abs=1e-2)
    np.testing.assert_allclose(kernel, largest.T @ dy.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bias, np.sum(dy, 0), rtol=1e-5, atol=1e-5)


def test_of_a_normalized_batch_the_deviations_are_kept():
    x = _normal((64, 6)) * tf.range(1.0, 7.0)
    model = _whole(lambda: layers.BatchNormalization(), (6,), 0.5)
    first, norm = model.layers
    with tf.GradientTape() as tape:
        y = model(x, training=True)
    dy = _normal(y.shape, 9)
    gamma, beta = tape.gradient(y, [norm.gamma.value, norm.beta.value], dy)
    hidden = first(x).numpy()
    deviations = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + norm.epsilon)
    threshold = np.sort(np.abs(deviations).ravel())[deviations.size // 2 - 1]
    largest = np.where(np.abs(deviations) <= threshold, 0, deviations)
    np.testing.assert_allclose(gamma, np.sum(largest * dy, 0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(beta, np.sum(dy, 0), rtol=1e-5, atol=1e-5)


def test_a_tensor_read_by_many_is_kept_once():
    inputs = keras.Input((32,))
    hidden = layers.Dense(64, name="hidden")(inputs)
    outputs = layers.Add()([layers.Dense(4, name=f"d{i}")(hidden) for i in range(4)])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    x, y = _normal((64, 32)).numpy(), np.zeros((64, 4), "float32")
    bt.compress(model)
    bt.ActivationPruning(0.9, mode="saved", verbose=0).set_model(model)
    assert _kept_share(model, x, y, "hidden") <= 0.1 + 1 / 32 + 0.01


def test_of_attention_nothing_dense_is_kept():
    inputs = keras.Input((64, 16))
    x = layers.Dense(16)(inputs)
    x = layers.MultiHeadAttention(4, 8)(layers.LayerNormalization()(x), x)
    x = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(16)(x))
    model.compile("sgd", "mse")
    x = _normal((32, 64, 16)).numpy()
    stock = bt.analyze(model, x, x)
    bt.compress(model)
    bt.ActivationPruning(0.9, mode="saved", verbose=0).set_model(model)
    found = bt.analyze(model, x, x)
    # But for the data and the statistics of the normalizations.
    assert found.totals.get("dense", 0) <= 0.04 * stock.kept_bytes
    assert found.kept_bytes <= 0.1 * stock.kept_bytes


@pytest.mark.parametrize("mode", [FORWARD, SAVED])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_other_precisions(mode, policy):
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(8, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.Conv2D(8, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(8, activation="gelu"),
                layers.LayerNormalization(),
                layers.Dense(2, dtype="float32"),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile("sgd", "mse")
    bt.compress(model)
    x = _normal((64, 8, 8, 3)).numpy()
    pruning = bt.ActivationPruning(0.6, ramp=0, mode=mode, verbose=0)
    history = model.fit(x, np.zeros((64, 2)), epochs=3, verbose=0, callbacks=[pruning])
    assert np.all(np.isfinite(history.history["loss"]))
    assert all(row.sparsity > 0.5 for row in pruning.report().layers)
