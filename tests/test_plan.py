"""Plans for models: what they predict, and that `compress` does what they say."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import small_models as small
import tensorflow as tf
from keras import layers

import bittrain_tf as bt
from bittrain_tf.analysis.liveness import Densities, live_bytes
from bittrain_tf.analysis.plan import predicted_cost
from bittrain_tf.layers import KEEP, REBUILD, CompressedLayer
from bittrain_tf.private import flatten_layers
from bittrain_tf.rewrite import compressed_classes, switch


def residual_network(blocks: int = 5, size: int = 24, width: int = 16) -> small.Task:
    """Deep enough for its peak to be what it keeps."""
    x = inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, 3, padding="same", name="stem")(x)
    for i in range(blocks):
        y = x
        for part in "ab":
            y = layers.BatchNormalization(name=f"bn_{i}{part}")(y)
            y = layers.ReLU(name=f"relu_{i}{part}")(y)
            y = layers.Conv2D(width, 3, padding="same", name=f"conv_{i}{part}")(y)
        x = layers.Add(name=f"add_{i}")([x, y])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x), name="residual")
    x = np.random.default_rng(0).random((8, size, size, 3), dtype=np.float32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return small.Task(model, x, np.arange(8) % 3, loss).compile()


@pytest.fixture(scope="module")
def resnet():
    return residual_network()


@pytest.fixture(autouse=True)
def stock_again(resnet):
    yield
    bt.restore(resnet.model)


def choices_of(model):
    return {
        layer: layer.choice for layer in flatten_layers(model) if isinstance(layer, CompressedLayer)
    }


def predicted_peak(model, task):
    return predicted_cost(model, task.x, task.y)[0]


@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_a_memory_budget_is_met(resnet, share):
    model = resnet.model
    found = bt.plan(model, resnet.x, resnet.y, memory_budget=share)
    assert found.peak <= share * found.stock_peak
    assert found.stock_peak == predicted_peak(model, resnet)
    bt.compress(model, memory_budget=share, sample=(resnet.x, resnet.y))
    assert choices_of(model) == {
        layer: choice for layer, choice in found.choices.items() if layer in choices_of(model)
    }
    assert {KEEP, REBUILD} == set(choices_of(model).values())
    # Not of the planner: the graph that is trained.
    assert predicted_peak(model, resnet) == pytest.approx(found.peak, rel=0.02)


def test_less_memory_costs_time(resnet):
    plans = [bt.plan(resnet.model, memory_budget=share) for share in (0.9, 0.6, 0.45)]
    ratios = [p.time_ratio for p in plans]
    peaks = [p.peak for p in plans]
    assert ratios == sorted(ratios)
    assert peaks == sorted(peaks, reverse=True)
    assert ratios[-1] > ratios[0]


def test_bytes(resnet):
    stock_peak = bt.plan(resnet.model, resnet.x).stock_peak
    found = bt.plan(resnet.model, resnet.x, memory_budget=stock_peak // 2)
    assert found.peak <= stock_peak // 2
    with pytest.raises(ValueError, match="needs a sample batch: a budget in bytes"):
        bt.plan(resnet.model, memory_budget=stock_peak // 2)


def test_a_time_budget_is_met(resnet):
    quick, slow = (bt.plan(resnet.model, time_budget=ratio) for ratio in (1.0, 1.5))
    assert quick.time_ratio <= 1.0
    assert slow.time_ratio <= 1.5
    assert slow.peak <= quick.peak


def test_no_budget_is_the_time_of_stock(resnet):
    assert bt.plan(resnet.model).choices == bt.plan(resnet.model, time_budget=1.0).choices


def test_out_of_reach(resnet):
    with pytest.raises(ValueError, match="The lowest that can be reached is") as error:
        bt.plan(resnet.model, memory_budget=0.01)
    lowest = float(str(error.value).rpartition("memory_budget=")[2].rstrip("."))
    assert bt.plan(resnet.model, memory_budget=lowest).peak_ratio <= lowest
    assert not choices_of(resnet.model)


def test_time_out_of_reach():
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, activation="gelu", name="d")])
    with pytest.raises(ValueError, match="quickest plan is predicted to take 1") as error:
        bt.plan(model, time_budget=1.0)
    assert "time_budget is 1" in str(error.value)
    with pytest.raises(ValueError, match=r"time_budget allows 1\. Raise either"):
        bt.plan(model, memory_budget=1.0, time_budget=1.0)
    assert bt.plan(model).time_ratio > 1  # without a budget, that one


def test_nothing_changes(resnet):
    model = resnet.model
    before = [(type(layer), dict(vars(layer))) for layer in flatten_layers(model)]
    weights, function = small.weights(model), model.train_function
    bt.plan(model, resnet.x, resnet.y, memory_budget=0.6)
    assert [(type(layer), dict(vars(layer))) for layer in flatten_layers(model)] == before
    assert small.weights(model) == weights
    assert model.train_function is function


def test_the_same_plan_every_time(resnet):
    plans = [bt.plan(resnet.model, memory_budget=0.6) for _ in range(2)]
    assert plans[0] == plans[1]
    bt.compress(resnet.model)  # of the compressed model, too
    assert bt.plan(resnet.model, memory_budget=0.6) == plans[0]


def test_training_is_that_of_stock():
    """One step from the same state; see test_models.py for why not more."""
    task, stock = small.seeded(residual_network), small.seeded(residual_network)
    bt.compress(task.model, memory_budget=0.5, sample=(task.x, task.y))
    losses = [t.model.train_on_batch(t.x, t.y) for t in (task, stock)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    for a, b in zip(task.model.get_weights(), stock.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_densities_are_those_of_the_sample():
    """What is sparser takes less, and the plan knows."""

    def model(bias):
        return keras.Sequential(
            [
                keras.Input((32, 32, 8)),
                # Costs more to compute again than to decode.
                layers.Conv2D(
                    16,
                    9,
                    padding="same",
                    activation="relu",
                    bias_initializer=keras.initializers.Constant(bias),
                    name="first",
                ),
                layers.Conv2D(16, 3, name="second"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )

    x = np.random.default_rng(0).random((8, 32, 32, 8), dtype=np.float32)
    kept = {
        bias: next(row.kept_bytes for row in bt.plan(model(bias), x).layers if row.name == "first")
        for bias in (-9.0, 9.0)
    }
    nbytes = 8 * 32 * 32 * 16 * 4
    assert kept[-9.0] == nbytes // 32  # the bitmap alone
    assert kept[9.0] == nbytes + nbytes // 32


def test_a_model_of_unknown_shapes_needs_a_sample():
    inputs = keras.Input((None, None, 3))
    x = layers.Conv2D(8, 3, activation="relu", name="conv")(inputs)
    x = layers.Conv2D(8, 3, activation="relu", name="conv_1")(x)
    model = keras.Model(inputs, layers.GlobalAveragePooling2D(name="pool")(x), name="any_size")
    with pytest.raises(ValueError, match="'any_size' needs a sample batch: the shapes"):
        bt.plan(model, memory_budget=0.9)
    with pytest.raises(ValueError, match="sample is what to plan for"):
        bt.compress(model, sample=(np.zeros((2, 8, 8, 3), np.float32),))
    assert bt.plan(model, np.zeros((2, 8, 8, 3), np.float32)).stock_peak > 0


def test_regularizers_and_losses_of_layers():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(16, activation="relu", kernel_regularizer="l2", name="dense"),
            layers.Dense(16, activation="relu", activity_regularizer="l1", name="dense_1"),
            layers.Dense(1, name="head"),
        ]
    )
    model.compile("sgd", "mse")
    x, y = np.ones((4, 8), np.float32), np.ones((4, 1), np.float32)
    assert bt.plan(model, x, y).stock_peak > 0
    assert bt.analyze(model, x, y).rows


def test_layers_of_the_same_name():
    block = keras.Sequential(
        [keras.Input((16, 16, 8)), layers.Conv2D(8, 3, activation="relu", name="conv")], name="b"
    )
    inputs = keras.Input((16, 16, 8))
    x = block(layers.Conv2D(8, 1, activation="relu", name="conv")(inputs))
    x = layers.Conv2D(8, 3, name="last")(x)
    model = keras.Model(inputs, layers.GlobalAveragePooling2D(name="pool")(x))
    names = [row.name for row in bt.plan(model).layers]
    assert {"conv", "conv (2)"} <= set(names)


def test_report_says_the_choice(resnet):
    bt.compress(resnet.model, memory_budget=0.6)
    rows = {row.name: row.choice for row in bt.report(resnet.model).layers}
    assert {KEEP, REBUILD} <= set(rows.values())
    assert REBUILD in bt.report(resnet.model).render()


def test_texts(resnet):
    found = bt.plan(resnet.model, memory_budget=0.6)
    text = found.render()
    for part in ("this plan", "next smaller", "stock", "rebuild", found.layers[0].name):
        assert part in text
    assert json.loads(json.dumps(found.to_dict()))["peak"] == found.peak
    assert found.smaller[0] < found.peak
    assert found.quicker is None or found.quicker[1] < found.time_ratio


def test_live_bytes_of_a_graph():
    """x (400 bytes) is data; a and b are alive together, c is written over a, and its update."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [100])
        a = tf.sin(x)
        b = tf.cos(a)
        c = a * b
    found = {op.name: nbytes for op, nbytes in live_bytes(graph, [c], Densities(0.5))}
    assert [found[t.op.name] for t in (x, a, b, c)] == [0, 400, 800, 1200]


# Models and arguments that are not the usual ones


def test_recurrent_layers():
    model = keras.Sequential(
        [keras.Input((5, 4)), layers.LSTM(8, name="lstm"), layers.Dense(8, "relu", name="d")]
    )
    assert bt.plan(model).stock_peak > 0


def test_inputs_from_outside_the_graph():
    constant, variable = tf.ones((4, 8)), tf.Variable(tf.ones((4, 8)))

    class Offsets(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(8, activation="relu", name="first")
            self.product = layers.Multiply(name="product")
            self.total = layers.Add(name="total")

        def call(self, x):
            y = self.product([self.first(x), variable])
            return self.total([y, self.first(constant)])

    x = np.ones((4, 8), np.float32)
    results = []
    for compress in (False, True):
        model = small.seeded(Offsets)
        model(x)
        model.compile("sgd", "mse")
        if compress:
            assert bt.plan(model, x).stock_peak > 0
            bt.compress(model, memory_budget=1.0, sample=(x,))
        results.append(model.train_on_batch(x, x))
    assert results[0] == results[1]


def test_within_the_scope_of_a_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        task = residual_network(blocks=1)
        with pytest.raises(ValueError, match="outside of `with strategy"):
            bt.plan(task.model)
    assert bt.plan(task.model).stock_peak > 0


def test_nothing_to_train():
    model = residual_network(blocks=1).model
    model.trainable = False
    with pytest.raises(ValueError, match="'residual' has nothing to plan"):
        bt.plan(model)


def test_what_gains_nothing_is_told_so():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="only")])
    with pytest.raises(ValueError, match=r"gains nothing|memory_budget=0"):
        bt.plan(model, memory_budget=0.001)


@pytest.mark.parametrize("sample", [np.ones((4, 8)), {}, (), (1, 2, 3)])
def test_bad_samples(resnet, sample):
    with pytest.raises(ValueError, match=r"sample is one batch as a tuple, \(x,\) or \(x, y\)"):
        bt.compress(resnet.model, memory_budget=0.5, sample=sample)


def test_an_empty_batch(resnet):
    with pytest.raises(ValueError, match="no samples"):
        bt.plan(resnet.model, resnet.x[:0])


def test_masks_of_merged_inputs():
    """Keras zeroes what is masked out, by masks that ride on the very tensors merged."""

    def model():
        tokens = [keras.Input((6,), dtype="int32", name=f"tokens_{i}") for i in range(2)]
        embed = [layers.Embedding(9, 8, mask_zero=True, name=f"embed_{i}") for i in range(2)]
        read = [
            layers.Dense(8, name=f"dense_{i}")(e(t))
            for i, (e, t) in enumerate(zip(embed, tokens, strict=True))
        ]
        y = layers.Multiply(name="product")(read)
        return keras.Model(tokens, layers.Dense(3, name="head")(y))

    rng = np.random.default_rng(0)
    x = [rng.integers(0, 3, (4, 6)) for _ in range(2)]
    y = np.ones((4, 6, 3), np.float32)
    found = []
    for choice in (None, REBUILD):
        task = small.seeded(model)
        task.compile("sgd", "mse")
        if choice:
            choices = dict.fromkeys(flatten_layers(task), choice)
            switch(task, compressed_classes(task, "bitmap", None, choices))
        task.train_on_batch(x, y)
        found.append(small.weights(task))
    assert found[0] == found[1]
