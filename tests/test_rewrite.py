"""compress and restore on every kind of model, and what they must not change."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import small_models as small
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.framework import config

import bittrain_tf as bt
from bittrain_tf.layers import CompressedLayer, skip_reason, stock_class
from bittrain_tf.private import flatten_layers

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compressed_names(model):
    return [layer.name for layer in flatten_layers(model) if isinstance(layer, CompressedLayer)]


def trained(build, compress, steps=3, **options):
    task = small.seeded(build).compile(**options)
    if compress:
        bt.compress(task.model)
    return small.train(task.model, task.x, task.y, steps), task.model


def assert_trains_as_stock(build, exact=True, **options):
    """Bit for bit if `exact`. Returns the compressed model, trained."""
    losses, stock = trained(build, False, **options)
    compressed_losses, model = trained(build, True, **options)
    if exact:
        assert compressed_losses == losses
        assert small.weights(model) == small.weights(stock)
    else:
        np.testing.assert_allclose(compressed_losses, losses, rtol=1e-6)
        for mine, theirs in zip(model.get_weights(), stock.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert losses[-1] != losses[0]
    return model


def task_of(inputs, outputs, size=8):
    """A classification of images by the model from `inputs` to `outputs`."""
    x = small.convolutions().x[:, :size, :size]
    return small.Task(keras.Model(inputs, outputs), x, np.arange(4) % 3, CROSSENTROPY)


# Kinds of models


def nested():
    innermost = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu", name="deep_first"),
            layers.Conv2D(4, 3, activation="relu", name="deep_second"),
        ],
        name="innermost",
    )
    inner_input = keras.Input((8, 8, 3))
    y = layers.Conv2D(4, 3, activation="relu", name="middle")(innermost(inner_input))
    inner = keras.Model(inner_input, y, name="inner")
    inputs = keras.Input((8, 8, 3))
    x = layers.Flatten()(inner(inputs))
    return task_of(inputs, layers.Dense(3, name="top")(x))


def shared_layer():
    convolution = layers.Conv2D(3, 3, padding="same", activation="relu", name="shared")
    inputs = keras.Input((8, 8, 3))
    x = convolution(convolution(convolution(inputs)))
    return task_of(inputs, layers.Dense(3)(layers.Flatten()(x)))


def shared_sub_model():
    tower = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(3, 3, padding="same", activation="relu", name="in_tower"),
            layers.Conv2D(3, 3, padding="same", activation="relu"),
        ]
    )
    inputs = keras.Input((8, 8, 3))
    x = layers.Concatenate()([tower(inputs), tower(tower(inputs))])
    return task_of(inputs, layers.Dense(3)(layers.Flatten()(x)))


def several_inputs_and_outputs():
    first, second = keras.Input((8, 8, 3)), keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(first)
    y = layers.Conv2D(4, 3, activation="relu")(second)
    both = layers.Flatten()(layers.Maximum()([x, y]))
    outputs = [layers.Dense(3)(both), layers.Dense(1)(layers.Dense(5, activation="relu")(both))]
    x = small.convolutions().x
    y = [np.arange(4) % 3, np.ones((4, 1), np.float32)]
    return small.Task(keras.Model([first, second], outputs), [x, x[::-1]], y, [CROSSENTROPY, "mse"])


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Subclassed(keras.Model):
    """Layers in attributes, lists and dictionaries, Python control flow between."""

    def __init__(self, **options):
        super().__init__(**options)
        self.stem = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.blocks = [layers.Conv2D(4, 3, padding="same") for _ in range(2)]
        self.heads = {"classes": layers.Dense(3)}
        self.relu = layers.ReLU()

    def call(self, inputs, training=False):
        x = self.stem(inputs)
        for block in self.blocks:
            x = x + self.relu(block(x))
        return self.heads["classes"](ops.mean(self.relu(x), (1, 2)))


def subclassed():
    task = small.convolutions()
    model = Subclassed()
    model(task.x)
    return task._replace(model=model)


class WithTrainStep(keras.Model):
    """A functional model that trains its own way: twice the loss, and counts."""

    steps = 0

    def train_step(self, data):
        x, y = data[:2]
        self.steps += 1
        with tf.GradientTape() as tape:
            loss = 2.0 * self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def custom_train_step():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="relu")(inputs)
    x = layers.Conv2D(4, 3, activation="relu")(x)
    outputs = layers.Dense(3)(layers.Flatten()(x))
    return small.convolutions()._replace(model=WithTrainStep(inputs, outputs))


def raw_operations():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="before")(inputs)
    y = layers.Conv2D(4, 3, padding="same", activation="relu", name="between")(x)
    x = layers.Conv2D(4, 3, activation="relu", name="after_sum")(x + y)
    x = layers.Conv2D(4, 3, activation="relu", name="after_slice")(x[:, 1:])
    x = layers.Lambda(lambda t: t * 2.0 + 1.0)(ops.concatenate([x, ops.square(x)], axis=-1))
    return task_of(inputs, layers.Dense(3, name="head")(ops.mean(ops.relu(x), axis=(1, 2))))


def sequences(build):
    """A task on sequences: `build` makes a layer or layers to go between two dense ones."""

    def task():
        inputs = keras.Input((5, 4))
        x = build(layers.Dense(6, activation="relu")(inputs))
        outputs = layers.Dense(3)(layers.GlobalMaxPooling1D()(x))
        x = np.random.default_rng(3).standard_normal((4, 5, 4)).astype("float32")
        return small.Task(keras.Model(inputs, outputs), x, np.arange(4) % 3, CROSSENTROPY)

    return task


SEQUENCE_LAYERS = {
    "time_distributed": lambda x: layers.TimeDistributed(layers.Dense(6, activation="relu"))(x),
    "bidirectional": lambda x: layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x),
    "attention": lambda x: layers.MultiHeadAttention(2, 3)(x, x),
}


@pytest.mark.parametrize(
    "build",
    [
        small.convolutions,
        nested,
        shared_layer,
        shared_sub_model,
        several_inputs_and_outputs,
        small.two_tower,
        subclassed,
        custom_train_step,
        raw_operations,
        *(pytest.param(sequences(f), id=name) for name, f in SEQUENCE_LAYERS.items()),
    ],
)
def test_trains_as_stock(build):
    # The gradients of three calls of a shared layer may be added in another order.
    model = assert_trains_as_stock(build, exact=build not in (shared_layer, shared_sub_model))
    assert compressed_names(model)
    assert not compressed_names(bt.restore(model))


def test_every_level_of_nesting_is_rewritten_and_restored():
    """keras#21120: cloning stopped at one level."""
    model = nested().model
    bt.compress(model)
    assert {"deep_first", "deep_second", "middle", "top"} <= set(compressed_names(model))
    bt.restore(model)
    assert compressed_names(model) == []


def test_shared_layers_stay_one():
    """keras#20172: cloning made two weights of one."""
    for build in (shared_layer, shared_sub_model):
        model = build().model
        before = [id(v) for v in model.variables]
        count = model.count_params()
        bt.compress(model)
        assert [id(v) for v in model.variables] == before
        assert model.count_params() == count


def test_custom_train_step_runs():
    model = trained(custom_train_step, True)[1]
    assert type(model) is WithTrainStep
    assert model.steps  # when it was traced


def test_raw_operations_keep_their_neighbours_compressed():
    model = bt.compress(raw_operations().model)
    assert compressed_names(model) == ["before", "between", "after_sum", "after_slice", "head"]


def test_layers_inside_wrappers():
    for name, inside in (("time_distributed", "Dense"), ("attention", "EinsumDense")):
        model = bt.compress(sequences(SEQUENCE_LAYERS[name])().model)
        (wrapper,) = [w for w in model.layers if "Dense" in str(flatten_layers(w))]
        kinds = [type(layer).__name__ for layer in flatten_layers(wrapper)]
        assert inside in kinds
        assert any(isinstance(layer, CompressedLayer) for layer in flatten_layers(wrapper))


# Ways of training


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    """keras#21448: float16 inputs met float32 kernels in the backward pass."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = assert_trains_as_stock(small.convolutions)
        assert {v.dtype for v in model.trainable_variables} == {"float32"}
        task = small.seeded(small.convolutions)
        stock = eager_gradients(task)
        bt.compress(task.model)
        compressed = eager_gradients(task)
    finally:
        keras.config.set_dtype_policy(before)
    assert small.bits(compressed) == small.bits(stock)
    assert {g.dtype for g in compressed} == {tf.float32}


def eager_gradients(task):
    with tf.GradientTape() as tape:
        loss = task.loss(task.y, task.model(task.x, training=True))
    return tape.gradient(loss, task.model.trainable_variables)


@pytest.mark.parametrize("eager", [True, False])
def test_gradient_tape(eager):
    task = small.seeded(small.convolutions)
    function = eager_gradients if eager else lambda task: tf.function(eager_gradients)(task)
    stock = function(task)
    bt.compress(task.model)
    assert small.bits(function(task)) == small.bits(stock)


def test_persistent_tape_and_gradients_of_inputs():
    task = small.seeded(small.convolutions)

    def gradients():
        x = tf.constant(task.x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = task.model(x, training=True)
            first, second = tf.reduce_sum(y[:, 0]), tf.reduce_sum(y[:, 1])
        return [tape.gradient(first, x), tape.gradient(second, x)]

    stock = gradients()
    bt.compress(task.model)
    assert small.bits(gradients()) == small.bits(stock)


def test_run_eagerly():
    assert_trains_as_stock(small.convolutions, run_eagerly=True)


@pytest.mark.parametrize("batch_size", [4, 3])
def test_fit_with_validation(batch_size):
    """Also with a last batch that is smaller."""

    def history(compress):
        task = small.seeded(small.convolutions).compile(metrics=["accuracy"])
        if compress:
            bt.compress(task.model)
        x, y = np.tile(task.x, (2, 1, 1, 1)), np.tile(task.y, 2)
        fitted = task.model.fit(
            x, y, batch_size, epochs=2, verbose=0, validation_data=(task.x, task.y)
        )
        return fitted.history

    assert history(True) == history(False)


def test_inference_is_stock():
    def results(model):
        return model.predict(task.x, verbose=0), model.evaluate(task.x, task.y, verbose=0)

    task = small.seeded(small.convolutions).compile()
    predicted, loss = results(task.model)
    model = bt.compress(small.seeded(small.convolutions).compile().model)
    compressed_predicted, compressed_loss = results(model)
    np.testing.assert_array_equal(compressed_predicted, predicted)
    assert compressed_loss == loss

    def encodings(tape):
        @tf.function
        def forward(x):
            with tape:
                return model(x, training=False)

        operations = forward.get_concrete_function(task.x).graph.get_operations()
        return [op.name for op in operations if "encode" in op.name]

    assert not encodings(contextlib.nullcontext())
    assert encodings(tf.GradientTape())


@pytest.fixture
def xla(monkeypatch):
    """Keras compiles with XLA only where it has not been promised determinism."""
    monkeypatch.setattr(config, "is_op_determinism_enabled", lambda: False)


@pytest.mark.usefixtures("xla")
def test_jit_compile():
    task = small.seeded(small.convolutions).compile(jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True") as caught:
        bt.compress(task.model)
    assert caught[0].filename == __file__
    assert task.model.jit_compile is False
    small.train(task.model, task.x, task.y, 1)
    bt.restore(task.model)
    assert task.model.jit_compile is True


@pytest.mark.usefixtures("xla")
def test_jit_compile_auto_and_after():
    task = small.seeded(small.convolutions).compile(jit_compile="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bt.compress(task.model)
    assert not any(layer.supports_jit for layer in task.model.layers)
    with pytest.warns(UserWarning, match="jit_compile"):  # Keras's own
        task.compile(jit_compile=True)
    assert task.model.jit_compile is False
    small.train(task.model, task.x, task.y, 1)


def test_compiled_and_partly_trained():
    def build():
        task = small.seeded(small.convolutions)
        return task.compile(optimizer=keras.optimizers.Adam(1e-2))

    straight = build()
    losses = small.train(straight.model, straight.x, straight.y, 7)
    task = build()
    mine = small.train(task.model, task.x, task.y, 2)
    variables = [id(v) for v in (*task.model.variables, *task.model.optimizer.variables)]
    optimizer = task.model.optimizer
    bt.compress(task.model)
    assert task.model.optimizer is optimizer
    mine += small.train(task.model, task.x, task.y, 3)
    bt.restore(task.model)
    mine += small.train(task.model, task.x, task.y, 2)
    assert mine == losses
    assert small.weights(task.model) == small.weights(straight.model)
    assert variables == [id(v) for v in (*task.model.variables, *optimizer.variables)]


@pytest.mark.parametrize("whole", [True, False])
def test_frozen_layers(whole):
    """keras#11022: cloning lost the trainable flags."""

    def build():
        task = nested()
        inner = task.model.get_layer("inner")
        frozen = inner if whole else inner.get_layer("middle")
        frozen.trainable = False
        return task

    task = build()
    trainable = [id(v) for v in task.model.trainable_weights]
    bt.compress(task.model)
    assert [id(v) for v in task.model.trainable_weights] == trainable
    model = assert_trains_as_stock(build)
    fresh = small.seeded(build).model
    frozen = zip(model.non_trainable_weights, fresh.non_trainable_weights, strict=True)
    assert all(small.bits([a]) == small.bits([b]) for a, b in frozen)
    assert len(fresh.non_trainable_weights) == (6 if whole else 2)


# compress, restore, compressed


def state_of(model):
    """The class and the attributes, by identity, of a model and everything in it."""
    return [
        (layer, type(layer), {name: id(value) for name, value in vars(layer).items()})
        for layer in (model, *flatten_layers(model))
    ]


@pytest.mark.parametrize("build", [small.convolutions, nested, subclassed, small.noisy])
def test_restore_gives_back_what_was_there(build):
    task = small.seeded(build).compile()
    x, y = task.x, task.y
    small.train(task.model, x, y, 1)
    task.model.train_function = None  # the one thing that has to be made anew
    before = state_of(task.model)
    bt.compress(task.model)
    assert state_of(task.model) != before
    small.train(task.model, x, y, 1)
    bt.restore(task.model)
    assert state_of(task.model) == before


def test_the_model_is_changed_in_place_and_returned():
    model = small.convolutions().model
    assert bt.compress(model) is model
    assert bt.restore(model) is model
    assert bt.restore(model) is model


def without_registered_names(config):
    """Keras fills this field, which says the same once more, for classes it does not export."""
    if isinstance(config, dict):
        kept = {k: v for k, v in config.items() if k != "registered_name"}
        return {k: without_registered_names(v) for k, v in kept.items()}
    return [without_registered_names(v) for v in config] if isinstance(config, list) else config


@pytest.mark.parametrize("kind", ["convolutions", "subclasses", "subclassed"])
def test_names_and_configuration_are_those_of_keras(kind):
    build = {"subclasses": subclasses, "subclassed": subclassed}.get(kind, small.convolutions)
    model = build().model

    def seen():
        configuration = keras.saving.serialize_keras_object(model)
        layers_too = [keras.saving.serialize_keras_object(layer) for layer in model.layers]
        return without_registered_names([configuration, layers_too])

    before = seen()
    bt.compress(model)
    assert compressed_names(model)
    assert seen() == before
    assert all(isinstance(layer, stock_class(layer)) for layer in model.layers)


def test_second_call_changes_nothing():
    task = small.seeded(small.convolutions).compile()
    bt.compress(task.model)
    small.train(task.model, task.x, task.y, 1)
    before = state_of(task.model)
    function = task.model.train_function
    assert function is not None
    bt.compress(task.model)
    assert state_of(task.model) == before
    assert task.model.train_function is function


def test_other_options_change_the_model():
    task = small.seeded(small.convolutions).compile()
    bt.compress(task.model)
    losses = small.train(task.model, task.x, task.y, 1)
    function = task.model.train_function
    bt.compress(task.model, codec="dense")
    assert {layer.codec.name for layer in task.model.layers} == {"dense"}
    losses += small.train(task.model, task.x, task.y, 1)
    assert task.model.train_function is not function
    bt.compress(task.model, filters="second")
    assert compressed_names(task.model) == ["second"]
    losses += small.train(task.model, task.x, task.y, 1)
    assert losses == trained(small.convolutions, False)[0]


def test_compressed_context():
    model = small.convolutions().model
    before = state_of(model)
    with bt.compressed(model, codec="dense") as inside:
        assert inside is model
        assert compressed_names(model)
    assert state_of(model) == before

    def fail():
        assert compressed_names(model)
        raise KeyError("from inside")

    with pytest.raises(KeyError, match="from inside"), bt.compressed(model):
        fail()
    assert state_of(model) == before


def test_compressed_context_within_a_compressed_model():
    model = bt.compress(small.convolutions().model, filters="first")
    with bt.compressed(model, codec="dense"):
        assert len(compressed_names(model)) == 4
    assert compressed_names(model) == ["first"]
    assert model.get_layer("first").codec.name == "bitmap"


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (None, ["first", "second", "flatten", "head"]),
        ("^(first|second)$", ["first", "second"]),
        (["head"], ["head"]),
        (("second", "first"), ["first", "second"]),
        (lambda layer: isinstance(layer, keras.layers.Dense), ["head"]),
    ],
)
def test_filters(filters, expected):
    model = small.seeded(small.convolutions).model
    assert compressed_names(bt.compress(model, filters=filters)) == expected


@pytest.mark.usefixtures("xla")
def test_warnings_as_errors_leave_nothing_behind():
    task = small.convolutions().compile(jit_compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context = bt.compressed(task.model)
        with pytest.raises(UserWarning, match="jit_compile=True"):
            context.__enter__()
    assert compressed_names(task.model) == []
    assert task.model.jit_compile is True


def test_a_model_with_nothing_to_compress_warns():
    model = keras.Sequential([keras.Input((3,)), layers.Softmax()])
    with pytest.warns(UserWarning, match="No layer of model") as caught:
        bt.compress(model)
    assert caught[0].filename == __file__


# Arguments


@pytest.mark.parametrize("budget", [-1, 0, 0.0, 2.5, True, float("nan"), "half"])
def test_bad_memory_budget(budget):
    with pytest.raises(ValueError, match="memory_budget must be") as error:
        bt.compress(small.convolutions().model, memory_budget=budget)
    assert repr(budget) in str(error.value)


@pytest.mark.parametrize("budget", [0.5, -1, float("nan"), "fast", True])
def test_bad_time_budget(budget):
    with pytest.raises(ValueError, match="time_budget is the step time") as error:
        bt.compress(small.convolutions().model, time_budget=budget)
    assert repr(budget) in str(error.value)


def test_unknown_codec():
    for codec in ("zip", None, ["bitmap"]):
        with pytest.raises(ValueError, match=r"expected one of \['bitmap', 'dense'") as error:
            bt.compress(small.convolutions().model, codec=codec)
        assert repr(codec) in str(error.value)


def test_unbuilt_model():
    for model in (Subclassed(name="unbuilt"), keras.Sequential([layers.Dense(3)], name="unbuilt")):
        with pytest.raises(ValueError, match=r"'unbuilt' is not built yet.*Call it on a batch"):
            bt.compress(model)


@pytest.mark.parametrize("thing", [None, 3, "model.keras", tf.Module(), layers.Dense(3)])
def test_not_a_model(thing):
    for function in (bt.compress, bt.restore):
        with pytest.raises(TypeError, match=r"Expected a keras.Model, got .*") as error:
            function(thing)
        assert type(thing).__name__ in str(error.value)
    with pytest.raises(TypeError, match="Expected a keras"), bt.compressed(thing):
        pass


@pytest.mark.parametrize("filters", ["nowhere", [], lambda layer: False])
def test_filters_matching_nothing(filters):
    with pytest.raises(ValueError, match=r"matches no layer.*first, second") as error:
        bt.compress(small.convolutions().model, filters=filters)
    assert repr(filters) in str(error.value)


def test_filters_with_a_typo():
    with pytest.raises(ValueError, match=r"not there: \['secnod'\].*first, second"):
        bt.compress(small.convolutions().model, filters=["first", "secnod"])


def test_filters_that_are_no_regular_expression():
    with pytest.raises(ValueError, match=r"filters='\(first' is no regular expression"):
        bt.compress(small.convolutions().model, filters="(first")


@pytest.mark.parametrize("filters", [3, [1, 2], b"first"])
def test_filters_of_a_wrong_type(filters):
    with pytest.raises(TypeError, match="filters must be") as error:
        bt.compress(small.convolutions().model, filters=filters)
    assert repr(filters) in str(error.value)


def test_a_failed_call_changes_nothing():
    model = small.convolutions().model
    before = state_of(model)
    for bad in ({"codec": "zip"}, {"filters": "nowhere"}, {"memory_budget": 1}):
        with pytest.raises(ValueError, match=r"expected|filters|sample"):
            bt.compress(model, **bad)
    assert state_of(model) == before


# Subclasses of Keras layers


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Doubled(layers.Conv2D):
    """Computes something else than `Conv2D`."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Named(layers.Conv2D):
    """Only built differently."""

    def __init__(self, filters, kernel_size=3, activation="relu", **options):
        super().__init__(filters, kernel_size, activation=activation, **options)


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class OwnKernel(layers.Conv2D):
    """Convolves in another way, which `Conv2D.call` would run."""

    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, kernel * kernel)


def subclasses():
    inputs = keras.Input((8, 8, 3))
    x = Named(3, name="named")(inputs)
    x = Doubled(3, 3, activation="relu", name="doubled")(x)
    x = OwnKernel(3, 3, activation="relu", name="own_kernel")(x)
    return task_of(inputs, layers.Dense(3, name="head")(layers.Flatten(name="flatten")(x)))


def test_subclasses_of_keras_layers():
    model = assert_trains_as_stock(subclasses)
    assert compressed_names(model) == ["named", "flatten", "head"]
    assert stock_class(model.get_layer("named")) is Named
    assert skip_reason(model.get_layer("named")) is None
    for name in ("doubled", "own_kernel"):
        assert "a Conv2D with a `call` of its own" in skip_reason(model.get_layer(name))
    bt.restore(model)
    assert type(model.get_layer("named")) is Named


# Files and copies


def copies(model):
    yield "clone_model", keras.models.clone_model(model)
    yield "deepcopy", copy.deepcopy(model)
    yield "pickle", pickle.loads(pickle.dumps(model))
    yield "from_config", type(model).from_config(model.get_config())


@pytest.mark.parametrize("build", [small.convolutions, nested])
def test_copies_of_a_compressed_model(build):
    task = small.seeded(build)
    bt.compress(task.model)
    expected = task.model(task.x).numpy()
    for kind, model in copies(task.model):
        model.set_weights(task.model.get_weights())
        np.testing.assert_array_equal(model(task.x), expected, err_msg=kind)
        again = bt.compress(task._replace(model=model).compile().model)
        assert compressed_names(again), kind
        assert not compressed_names(bt.restore(again)), kind
        if kind == "clone_model":
            small.train(bt.compress(model), task.x, task.y, 1)


def test_weights_go_both_ways(tmp_path):
    path = tmp_path / "model.weights.h5"
    task, other = small.seeded(nested), small.seeded(nested, seed=1)
    bt.compress(task.model).save_weights(path)
    other.model.load_weights(path)
    assert small.weights(other.model) == small.weights(task.model)
    small.seeded(nested, seed=2).model.save_weights(path)
    task.model.load_weights(path)
    assert small.weights(task.model) != small.weights(other.model)


WITHOUT_THE_PACKAGE = """
import pathlib, sys
sys.modules["bittrain_tf"] = None
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
folder = pathlib.Path(sys.argv[1])
data = np.load(folder / "data.npz")
x, y = data["x"], data["y"]
results = {}
model = keras.models.load_model(folder / "model.keras")
results["keras"] = model(x)
other = keras.models.model_from_json((folder / "model.json").read_text())
other.load_weights(folder / "model.weights.h5")
results["weights"] = other(x)
exported = tf.saved_model.load(folder / "exported")
results["export"] = exported.serve(x)
results["losses"] = [model.train_on_batch(x, y) for _ in range(3)]
for i, weight in enumerate(model.get_weights()):
    results[f"trained_{i}"] = weight
model.save_weights(folder / "trained.weights.h5")
np.savez(folder / "results.npz", **results)
"""


def run_python(code, *arguments):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        timeout=120,
        env=environment,
    )


def test_files_need_no_package(tmp_path):
    """tf#40166: saved models that could not be trained, or loaded, without their maker."""
    task = small.seeded(nested).compile(optimizer=keras.optimizers.Adam(1e-2))
    model = bt.compress(task.model)
    small.train(model, task.x, task.y, 2)  # what is saved has optimizer slots
    np.savez(tmp_path / "data.npz", x=task.x, y=task.y)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    (tmp_path / "model.json").write_text(model.to_json())
    model.export(tmp_path / "exported", verbose=False)
    run_python(WITHOUT_THE_PACKAGE, tmp_path)
    results = np.load(tmp_path / "results.npz")
    predicted = model(task.x).numpy()
    for kind in ("keras", "weights", "export"):
        np.testing.assert_array_equal(results[kind], predicted, err_msg=kind)
    # The plain model goes on training exactly as the compressed one does.
    assert small.train(model, task.x, task.y, 3) == [float(x) for x in results["losses"]]
    trained_there = [results[f"trained_{i}"] for i in range(len(model.get_weights()))]
    assert small.bits(model.get_weights()) == small.bits(trained_there)
    # And its weights come back.
    other = bt.compress(small.seeded(nested, seed=5).model)
    other.load_weights(tmp_path / "trained.weights.h5")
    assert small.bits(other.get_weights()) == small.bits(trained_there)


# Several devices

MIRRORED = """
import json, pathlib, sys
import keras, numpy as np, tensorflow as tf
from keras import layers
import bittrain_tf as bt
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(0).random((8, 8, 8, 3), dtype=np.float32)
y = np.arange(8) % 3


def train(compress, normalize):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            *([layers.BatchNormalization()] if normalize else []),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
    if compress:
        bt.compress(model)
    losses = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    weights = [float(v) for w in model.get_weights() for v in np.ravel(w)]
    return losses + weights, model


def waits(model):  # the devices of the backward pass's operations, and of what they wait for
    def one(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    step = tf.function(lambda x: strategy.run(one, (x,)))
    ops = step.get_concrete_function(tf.TensorSpec((4, 8, 8, 3))).graph.get_operations()
    ops = [op for op in ops if "backward/" in op.name]
    return [(op.device, first.device) for op in ops for first in op.control_inputs]


results = {str(n): [train(c, n)[0] for c in (False, True)] for n in (False, True)}
results["waits"] = waits(train(True, True)[1])
results["replicas"] = strategy.num_replicas_in_sync
pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
"""


def test_mirrored_strategy(tmp_path):
    run_python(MIRRORED, tmp_path / "results.json")
    results = json.loads(pathlib.Path(tmp_path / "results.json").read_text())
    assert results["replicas"] == 2
    stock, compressed = results["False"]
    assert compressed == stock
    stock, compressed = results["True"]
    np.testing.assert_allclose(compressed, stock, rtol=1e-5, atol=1e-6)
    # Each replica takes its gradients in order, and no replica waits for another.
    assert {device[-5:] for device, _ in results["waits"]} == {"CPU:0", "CPU:1"}
    assert all(device == first for device, first in results["waits"])
