"""What is made again is the same bit for bit, in less memory and within the time."""

from __future__ import annotations

import copy

import keras
import numpy as np
import pytest
from keras import layers

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import interpreter as litert

from tflite_tools import cost, exporting, scheduling
from tflite_tools import flatbuffer as fb
from tflite_tools.graph import Graph
from tflite_tools.rebuilding import Rebuilding, rebuild
from tflite_tools.training import Training

BATCH, STEPS = 4, 5


@pytest.fixture(scope="module")
def converted():
    """Convolutions, normalizations and dropout; a step in whole batches, scheduled."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16, 16, 3))
    for strides in (1, 1, 2):
        y = layers.Conv2D(16, 3, strides, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(y))
    x = layers.Dense(3)(layers.Dropout(0.0)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    training = Training(keras.Model(inputs, x), loss, optimizer, {}, BATCH, False)
    file = exporting.converted(training, 1)
    scheduling.arrange(file)
    return file


def train_number(file):
    return next(k for k, s in enumerate(file.subgraphs) if fb.text(s.name) == "train")


def train(file, path):
    fb.write(file, path, overwrite=True)
    interpreter = litert.Interpreter(str(path))
    run = interpreter.get_signature_runner("train")
    rng = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, 16, 16, 3)).astype(np.float32)
        y = rng.integers(0, 3, BATCH).astype(np.int32)
        losses.append(float(run(x=x, y=y, learning_rate=np.float32(0.1))["loss"]))
    return losses, interpreter.get_signature_runner("get_weights")(nothing=np.zeros(1, np.float32))


@pytest.mark.parametrize(("time_budget", "at_most"), [(1.05, 0.99), (1.2, 0.9), (2.0, 0.9)])
def test_the_same_bits_in_less_memory(converted, time_budget, at_most, tmp_path):
    file = copy.deepcopy(converted)
    number = train_number(file)
    before = Graph(file, number)
    taken = sum(cost.seconds(before, i) for i in range(len(before)))
    scheduling.arrange(file, time_budget)
    after = Graph(file, number)

    assert after.is_order(range(len(after)))
    assert after.peak().nbytes < at_most * before.peak().nbytes
    assert len(after) > len(before)
    assert sum(cost.seconds(after, i) for i in range(len(after))) <= time_budget * taken
    assert after.names.count("ASSIGN_VARIABLE") == before.names.count("ASSIGN_VARIABLE")

    losses, weights = train(converted, tmp_path / "kept.tflite")
    losses_again, weights_again = train(file, tmp_path / "again.tflite")
    assert losses == losses_again
    assert losses[0] != losses[-1]
    for name, value in weights.items():
        np.testing.assert_array_equal(value, weights_again[name])


def test_more_time_takes_less_memory(converted):
    peaks = []
    for time_budget in (1.0, 1.05, 1.5):
        file = copy.deepcopy(converted)
        scheduling.arrange(file, time_budget)
        peaks.append(Graph(file, train_number(file)).peak().nbytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


@pytest.mark.parametrize("time_budget", [1.05, 1.2, 2.0])
def test_the_peak_is_what_it_was_taken_for(converted, time_budget):
    file = copy.deepcopy(converted)
    number = train_number(file)
    graph = Graph(file, number)
    rebuilding = Rebuilding(graph)
    rebuilding.lower((time_budget - 1) * sum(rebuilding.seconds))
    expected = int((rebuilding._live + rebuilding._extra).max())
    rebuild(file, number, time_budget)
    # Operators whose outputs are made again before they are read are left out at the end.
    assert Graph(file, number).peak().nbytes <= expected < graph.peak().nbytes


def test_nothing_with_effects_is_done_again(converted):
    before = Graph(converted, train_number(converted))
    file = copy.deepcopy(converted)
    scheduling.arrange(file, 2.0)
    after = Graph(file, train_number(file))
    for name in set(before.names):
        if not cost.is_pure(before, before.names.index(name)):
            assert after.names.count(name) == before.names.count(name)


def test_no_time_budget_below_one(tmp_path):
    with pytest.raises(ValueError, match="ratio from 1"):
        scheduling.schedule(tmp_path / "any.tflite", tmp_path / "other.tflite", time_budget=0.9)
