"""What was traced and is no longer needed is freed: by planning, analysing, re-compiling."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import bittrain_tf as bt
from bittrain_tf import private


def network(*activations):
    inputs = x = keras.Input((8, 8, 3))
    for activation in activations:
        x = layers.Conv2D(4, 3, use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation(activation)(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))
    model.compile("sgd", "mse")
    return model


X, Y = np.ones((4, 8, 8, 3), np.float32), np.zeros((4, 2), np.float32)


def graphs():
    gc.collect()
    return sum(isinstance(found, tf.Graph) for found in gc.get_objects())


@pytest.mark.parametrize(
    "use",
    [
        lambda model: bt.plan(model, X, Y),
        lambda model: bt.plan(model, X, Y, memory_budget=0.9),
        lambda model: bt.compress(model, time_budget=2.0, sample=(X, Y)),
        lambda model: bt.analyze(model, X, Y),
    ],
    ids=["plan", "plan in bytes", "compress", "analyze"],
)
def test_no_trace_outlives_its_reading(use):
    # TensorFlow itself registers a gradient for each call of SiLU.
    use(network("relu", "silu"))  # what functions of the codec's trace once, for good
    model = network("relu", "silu")
    before = graphs()
    use(model)
    assert graphs() <= before


def grown(use):
    """How many graphs more are alive after each use."""
    use()
    before = graphs()
    use()
    use()
    return (graphs() - before) / 2


# Stock Keras leaves one graph behind for each traced training step: its optimizer calls a
# function with a gradient of its own, which TensorFlow registers for good.


def test_training_in_turns_frees_what_it_replaces():
    stock, compressed = network("relu", "relu"), network("relu", "relu")

    def stock_turn():
        stock.compile("sgd", "mse")
        stock.fit(X, Y, verbose=0)

    def compressed_turn():
        bt.compress(compressed)
        compressed.fit(X, Y, verbose=0)
        bt.restore(compressed)

    assert grown(compressed_turn) <= grown(stock_turn)


def test_planned_models_go_when_they_are_deleted():
    def train(compress):
        model = network("relu", "relu")
        if compress:
            bt.compress(model, time_budget=2.0, sample=(X, Y))
        model.train_on_batch(X, Y)

    assert grown(lambda: train(True)) <= grown(lambda: train(False))


def test_a_gradient_from_outside_of_the_function():
    """Then TensorFlow follows the operations, by what is registered."""
    x = tf.constant([1.0, 2.0])

    @tf.function
    def doubled(x):
        (y,) = private.custom_gradient([x + 1.0], [x], lambda dy: [5.0 * dy])
        return y * 2.0

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = doubled(x)
    np.testing.assert_array_equal(y, [4.0, 6.0])
    np.testing.assert_array_equal(tape.gradient(y, x), [10.0, 10.0])


def test_a_gradient_that_is_not_known():
    with tf.Graph().as_default():
        x = tf.constant([1.0])
        (y,) = private.custom_gradient([x + 1.0], [x], lambda dy: [dy])
        definition = tf.compat.v1.get_default_graph().as_graph_def()
        read = y.name
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        again = graph.get_tensor_by_name(read)
        with pytest.raises(LookupError, match="not known in this graph"):
            tf.gradients(again, again.op.inputs[0])
