"""Layers and blocks re-run as a whole, asked for by `filters`: training is that of stock Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as small
import tensorflow as tf
from harness import ancestors, to_numpy
from keras import layers, ops

import bittrain_tf as bt
from bittrain_tf.layers import Rerun
from bittrain_tf.private import flatten_layers

pytestmark = pytest.mark.usefixtures("plain_graphs")

SHAPE = (4, 6, 6, 3)


def normals(*shape):
    return np.random.default_rng(5).standard_normal(shape).astype("float32")


def rerun_names(model):
    return [layer.name for layer in flatten_layers(model) if isinstance(layer, Rerun)]


def with_part(part, shape=SHAPE):
    """A model with `part(x)`, a function of a tensor, between two dense layers."""
    inputs = keras.Input(shape[1:], name="images")
    x = part(layers.Dense(shape[-1], name="first")(inputs))
    x = layers.Flatten(name="flat")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="outer")


# Custom layers


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Noisy(layers.Layer):
    """Dropout and batch normalization inside, their `training` passed on by Keras alone."""

    def __init__(self, **options):
        super().__init__(**options)
        self.convolution = layers.Conv2D(3, 3, padding="same", name="convolution")
        self.normalization = layers.BatchNormalization(name="normalization")
        self.dropout = layers.Dropout(0.4, seed=3, name="dropout")

    def build(self, shape):
        self.convolution.build(shape)
        self.normalization.build(shape)

    def call(self, x):
        x = self.dropout(ops.tanh(self.normalization(self.convolution(x))))
        return x * ops.sigmoid(x)

    def get_config(self):
        return super().get_config()  # without one of its own, Keras leaves out the name


class SeedOfItsOwn(layers.Layer):
    """Draws from a generator of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        x = ops.exp(-ops.square(x))
        return keras.random.dropout(x, 0.4, seed=self.generator) if training else x


class Penalty(layers.Layer):
    """Adds two losses, and counts its calls in a variable."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32", name="calls"
        )

    def call(self, x):
        # No tensor has more than two readers: the order of adding up three gradients is a
        # tape's own.
        z = x * self.factor
        y = ops.exp(-ops.square(z))
        self.calls.assign(self.calls + 1)
        self.add_loss(ops.mean(y))
        self.add_loss(0.1 * ops.mean(ops.tanh(z)))
        return y

    def compute_output_shape(self, shape):
        return shape


class Mixed(layers.Layer):
    """Nested inputs, one of integers, to several outputs, one of integers."""

    def build(self, shape):
        self.table = self.add_weight(shape=(5, 3), initializer="uniform", name="table")

    def call(self, inputs, scale=1.0, shift=None):
        first, second = inputs["pair"]
        chosen = ops.take(self.table, inputs["index"], axis=0)[:, None, None]
        x = ops.tanh(first * second) * scale + chosen
        if shift is not None:
            x = x + ops.square(shift)
        return {"float": [x, ops.sin(x)], "integer": ops.cast(x > 0, "int32")}


def mixed_model():
    inputs = keras.Input(SHAPE[1:], name="images")
    index = keras.Input((), dtype="int32", name="index")
    x = layers.Dense(3, name="first")(inputs)
    y = Mixed(name="part")({"pair": [x, inputs], "index": index}, scale=0.5, shift=x)
    # One output not used, and the integers multiplied in.
    x = y["float"][1] * ops.cast(y["integer"] + 1, "float32")
    return keras.Model([inputs, index], layers.Dense(2, name="head")(layers.Flatten(name="f")(x)))


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Masked(layers.Layer):
    """Reads the mask of a sequence, and passes it on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_masking = True

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x, mask=None):
        return ops.tanh(x * self.factor) * ops.cast(mask, x.dtype)[..., None]

    def get_config(self):
        return super().get_config()


def masked_model():
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = layers.Embedding(7, 4, mask_zero=True, name="embedding")(tokens)
    x = layers.GlobalAveragePooling1D(name="pool")(Masked(name="part")(x))
    return keras.Model(tokens, layers.Dense(2, name="head")(x))


# Blocks


def functional_block(name="part"):
    inputs = keras.Input(SHAPE[1:], name=f"{name}_inputs")
    x = layers.Conv2D(4, 3, padding="same", name=f"{name}_convolution")(inputs)
    x = layers.BatchNormalization(name=f"{name}_normalization")(x)
    x = layers.ReLU(name=f"{name}_relu")(x)
    x = layers.Dropout(0.3, seed=1, name=f"{name}_dropout")(x)
    x = layers.Conv2D(
        3, 3, padding="same", activation="gelu", activity_regularizer="l2", name=f"{name}_last"
    )(x)
    return keras.Model(inputs, layers.Add(name=f"{name}_add")([inputs, x]), name=name)


def sequential_block(name="part"):
    return keras.Sequential(
        [
            keras.Input(SHAPE[1:], name=f"{name}_inputs"),
            layers.Dense(8, activation="tanh", kernel_regularizer="l2", name=f"{name}_wide"),
            layers.Dropout(0.3, seed=1, name=f"{name}_dropout"),
            layers.LayerNormalization(name=f"{name}_normalization"),
            layers.Dense(3, name=f"{name}_narrow"),
        ],
        name=name,
    )


class SubclassedBlock(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.parts = [functional_block("inner"), sequential_block("behind")]

    def call(self, x, training=None):
        for part in self.parts:
            x = part(x, training=training)
        return x


def twice(part):
    """A layer used twice."""
    return lambda x: part(ops.tanh(part(x)))


def embedding_block():
    tokens = keras.Input((5,), dtype="int32", name="part_tokens")
    x = layers.Embedding(7, 4, mask_zero=True, name="part_embedding")(tokens)
    return keras.Model(tokens, x, name="part")


def block_making_a_mask():
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = layers.GlobalAveragePooling1D(name="pool")(embedding_block()(tokens))
    return keras.Model(tokens, layers.Dense(2, name="head")(x))


MODELS = {
    "noisy": lambda: with_part(Noisy(name="part")),
    "seed_of_its_own": lambda: with_part(SeedOfItsOwn(name="part")),
    "penalty": lambda: with_part(Penalty(name="part")),
    "lambda": lambda: with_part(layers.Lambda(lambda x: ops.tanh(x) * x, name="part")),
    "mixed": mixed_model,
    "masked": masked_model,
    "functional": lambda: with_part(functional_block()),
    "sequential": lambda: with_part(sequential_block()),
    "subclassed": lambda: with_part(SubclassedBlock(name="part")),
    "layer_twice": lambda: with_part(twice(Noisy(name="part"))),
    "block_twice": lambda: with_part(twice(functional_block())),
    "block_making_a_mask": block_making_a_mask,
    "lstm": lambda: with_part(layers.LSTM(3, return_sequences=True, name="part"), (4, 5, 3)),
}


STATELESS = {"lambda", "mixed", "masked", "block_making_a_mask", "lstm"}


def data(model):
    """A batch for one of the models."""
    x = []
    for t in model.inputs:
        shape = (4, *t.shape[1:])
        tokens = np.random.default_rng(6).integers(0, 5, shape).astype("int32")
        x.append(tokens if t.dtype == "int32" else normals(*shape))
    return x if len(x) > 1 else x[0], normals(4, 2)


def step(model, graph=True):
    """Loss, losses added, gradients of inputs and weights, and then the state: of one step."""
    x, y = data(model)
    xs = [tf.constant(t) for t in (x if isinstance(x, list) else [x])]

    def run():
        with tf.GradientTape() as tape:
            tape.watch([t for t in xs if t.dtype.is_floating])
            outputs = model(xs if len(xs) > 1 else xs[0], training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
            total = tf.add_n([loss, *(tf.cast(t, loss.dtype) for t in model.losses)])
        floats = [t for t in xs if t.dtype.is_floating]
        gradients = tape.gradient(total, [*floats, *(v.value for v in model.trainable_variables)])
        return [loss, *model.losses, *map(tf.convert_to_tensor, gradients)]

    found = (tf.function(run, autograph=False) if graph else run)()
    return [to_numpy(t).tobytes() for t in [*found, *(v.value for v in model.variables)]]


@pytest.mark.parametrize(
    ("name", "graph"),
    [*((name, True) for name in MODELS), *((name, False) for name in ("noisy", "functional"))],
)
def test_step_is_that_of_stock(name, graph):
    """Bit for bit, state included; two steps, so that the state has moved on."""
    stock, model = (small.seeded(MODELS[name]) for _ in range(2))
    bt.compress(model, filters=["part"])
    assert rerun_names(model) == ["part"]
    states = []
    for _ in range(2):
        theirs, ours = step(stock, graph), step(model, graph)
        assert len(ours) == len(theirs)
        different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert not different
        states.append(theirs)
    assert (states[0] != states[1]) == (name not in STATELESS)


@pytest.mark.parametrize("name", ["noisy", "functional", "sequential"])
@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_mixed_precision(name, policy):
    def build():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = MODELS[name]()
        finally:
            keras.config.set_dtype_policy(before)
        for layer in flatten_layers(model):  # Keras adds losses of one dtype only
            layer.activity_regularizer = None
        return model

    stock, model = (small.seeded(build) for _ in range(2))
    bt.compress(model, filters=["part"])
    assert step(model) == step(stock)


def test_a_wider_layer_inside_keeps_its_precision():
    def build():
        wide = layers.Dense(3, dtype="float32", name="wide")
        block = keras.Sequential(
            [keras.Input(SHAPE[1:]), layers.Dense(3, dtype="mixed_float16", name="narrow"), wide],
            name="part",
        )
        block.dtype_policy = "mixed_float16"
        return with_part(block)

    stock, model = (small.seeded(build) for _ in range(2))
    bt.compress(model, filters=["part"])
    assert step(model) == step(stock)


# Left to stock


class Unseeded(layers.Layer):
    def call(self, x):
        return x * tf.random.uniform(tf.shape(x))


class GloballySeeded(layers.Layer):
    def call(self, x):
        return x * keras.random.uniform(ops.shape(x))


class Hidden(layers.Layer):
    """Reads a variable that Keras does not know."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = [tf.Variable(2.0)]

    def call(self, x):
        return ops.tanh(x * self.hidden[0])


class LeavesTensor(layers.Layer):
    """Hands a tensor over as an attribute."""

    def call(self, x):
        self.seen = ops.square(x)
        return ops.tanh(x)


def forward_operations(model):
    x = tf.constant(normals(*SHAPE))

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    names = [op.name for op in run.get_concrete_function().graph.get_operations()]
    return [name for name in names if "/part" in f"/{name}"]


@pytest.mark.parametrize("kind", [Unseeded, GloballySeeded, Hidden, LeavesTensor])
def test_what_cannot_be_repeated_is_left_to_stock(kind):
    model = with_part(kind(name="part"))
    stock = forward_operations(model)
    bt.compress(model, filters=["part"])
    assert rerun_names(model) == ["part"]
    assert forward_operations(model) == stock
    assert not [name for name in stock if name.startswith("backward/")]


def test_a_closure_keeps_its_gradient():
    seen = []

    def remember(x):
        seen[:] = [x]
        return x

    inputs = keras.Input(SHAPE[1:])
    x = layers.Lambda(remember, name="remember")(layers.Dense(3, name="first")(inputs))
    x = layers.Lambda(lambda t: ops.tanh(t) * seen[0], name="part")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(layers.Flatten(name="flat")(x)))
    stock = step(model)
    bt.compress(model, filters=["part"])
    assert step(model) == stock


# Memory


@pytest.mark.parametrize("name", ["noisy", "functional", "sequential"])
def test_nothing_inside_is_kept(name):
    model = small.seeded(MODELS[name])
    model.compile("sgd", "mse")
    for variable in model.trainable_variables:
        variable.regularizer = None  # `analyze` cannot trace these

    def made_inside():
        rows = bt.analyze(model, *data(model)).rows
        return [row.tensor for row in rows if "part" in row.layer and row.kind != "small"]

    stock = made_inside()
    assert len(stock) > 2
    bt.compress(model, filters=["part"])
    assert len(made_inside()) == 1  # the output, which the head reads


def test_random_numbers_are_drawn_again():
    """TensorFlow makes one of equal operations: then the numbers would be held, at full size."""
    model = bt.compress(MODELS["seed_of_its_own"](), filters=["part"])
    x = tf.constant(normals(*SHAPE))

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    operations = run.get_concrete_function().graph.get_operations()
    draws = [op for op in operations if op.type == "StatelessRandomGetKeyCounter"]
    # What is kept waits for the gradient, behind a node of its own.
    waiting = [any(a.type == "IdentityN" for a in ancestors(op)) for op in draws]
    assert waiting == [False, True]


# Options


def test_filters():
    def names(filters):
        model = with_part(lambda x: functional_block("block")(Noisy(name="noisy")(x)))
        return rerun_names(bt.compress(model, filters=filters))

    assert names(None) == []
    assert names("block|first") == []  # a block has to be named
    assert names(lambda layer: True) == []
    assert names(["block", "first"]) == ["block"]
    assert names(["noisy", "block"]) == ["noisy", "block"]


def test_leaf_layers_by_any_filter():
    for filters in ("part", ["part"], lambda layer: layer.name == "part"):
        model = MODELS["penalty"]()
        assert rerun_names(bt.compress(model, filters=filters)) == ["part"]
    assert rerun_names(bt.compress(MODELS["penalty"]())) == []


@pytest.mark.parametrize(
    "layer",
    [
        layers.GlobalAveragePooling2D(name="part"),
        layers.Softmax(name="part"),
        layers.Activation("tanh", name="part"),
        layers.Subtract(name="part"),
    ],
)
@pytest.mark.filterwarnings("ignore:No layer")
def test_layers_that_gain_nothing_stay_stock(layer):
    def part(x):
        return layer([x, x]) if isinstance(layer, layers.Subtract) else layer(x)

    assert rerun_names(bt.compress(with_part(part), filters=["part"])) == []


def test_cells_and_wrapped_layers_stay_stock():
    inputs = keras.Input((5, 3))
    x = layers.TimeDistributed(Penalty(name="wrapped"), name="wrapper")(inputs)
    x = layers.LSTM(3, name="lstm")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    assert rerun_names(bt.compress(model, filters=lambda layer: True)) == []


def test_parts_of_a_block_are_stock():
    model = with_part(functional_block())
    bt.compress(model)
    assert "part_convolution" in compressed_rows(model)
    bt.compress(model, filters=["part", "part_convolution", "first"])
    assert compressed_rows(model) == {"part", "first"}
    # and compressed again, once the block is not named any more.
    bt.compress(model)
    assert "part_convolution" in compressed_rows(model)
    assert rerun_names(model) == []


def compressed_rows(model):
    return {row.name for row in bt.report(model).layers if row.status == "compressed"}


def test_report():
    model = bt.compress(with_part(functional_block()), filters=["part"])
    rows = {row.name: row for row in bt.report(model).layers}
    assert (rows["part"].status, rows["part"].reason) == ("compressed", "re-run as a whole")
    assert rows["part"].class_name == "Functional"
    inner = rows["part_convolution"]
    assert (inner.status, inner.reason) == ("stock", "re-run as part of part")
    assert rows["first"].reason == "left out by filters"
    assert "re-run as part of part" in bt.report(model).render()


def test_second_call_restore_and_context():
    model = with_part(functional_block())
    before = {layer: type(layer) for layer in flatten_layers(model)}
    with bt.compressed(model, filters=["part"]):
        once = {layer: type(layer) for layer in flatten_layers(model)}
        assert rerun_names(model) == ["part"]
        bt.compress(model, filters=["part"])
        assert {layer: type(layer) for layer in flatten_layers(model)} == once
    assert {layer: type(layer) for layer in flatten_layers(model)} == before
    bt.compress(model, filters=["part"])
    bt.restore(model)
    assert {layer: type(layer) for layer in flatten_layers(model)} == before


@pytest.mark.parametrize("name", ["noisy", "functional", "sequential", "masked"])
def test_files_are_those_of_keras(name, tmp_path):
    model = small.seeded(MODELS[name])
    model.compile("sgd", "mse")
    config, json = model.get_config(), model.to_json()
    x, _ = data(model)
    expected = model.predict(x, verbose=0)
    bt.compress(model, filters=["part"])
    assert model.get_config() == config
    assert model.to_json() == json
    assert bt.compress(keras.models.clone_model(model), filters=["part"]).to_json() == json
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("part")) is type(bt.restore(model).get_layer("part"))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")


def test_a_clone_of_a_rerun_layer_still_takes_training():
    """Keras reads the arguments of `call` from its signature, when the layer is made."""
    model = bt.compress(with_part(sequential_block()), filters=["part"])
    part = model.get_layer("part")
    copy = type(part).from_config(part.get_config())
    x = normals(*SHAPE)
    assert np.any(copy(x, training=True) != copy(x, training=False))


def test_with_a_budget():
    model = small.seeded(MODELS["functional"])
    model.compile("sgd", "mse")
    bt.compress(model, filters=["part", "first"], time_budget=9.0)
    assert rerun_names(model) == ["part"]
    x, y = data(model)
    assert np.isfinite(model.train_on_batch(x, y))


def test_with_the_metrics_of_fit():
    histories = []
    for filters in (None, ["part"]):
        model = small.seeded(MODELS["functional"])
        model.compile("sgd", "mse", metrics=["mae"])
        if filters:
            bt.compress(model, filters=filters)
        x, y = data(model)
        histories.append(model.fit(x, y, epochs=3, batch_size=2, shuffle=False, verbose=0).history)
    assert histories[0] == histories[1]


def test_second_derivatives_are_refused():
    model = bt.compress(MODELS["lambda"](), filters=["part"])
    x = tf.constant(normals(*SHAPE))

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model(x)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    with pytest.raises(NotImplementedError, match="second derivative"):
        run()
