"""Files that train: in LiteRT as in Keras, with builtin operators only."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert import interpreter as litert
from keras import layers

import tflite_tools
from tflite_tools import exporting, flatbuffer, manifest
from tflite_tools.graph import Graph

BATCH, STEPS = 4, 20
NOTHING = {"nothing": np.zeros(1, np.float32)}
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def lenet():
    return keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(4, 3, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(10),
        ]
    )


def residual():
    x = inputs = keras.Input((12, 12, 3))
    for channels, strides in ((4, 1), (8, 2)):
        y = layers.Conv2D(channels, 3, strides, padding="same", use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
        y = layers.BatchNormalization()(y)
        x = layers.Add()([y, layers.Conv2D(channels, 1, strides)(x)])
        x = layers.Activation("swish")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def autoencoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="gelu"),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="elu"),
            layers.MaxPooling2D(3, 2, padding="same"),
            layers.UpSampling2D(2),
            layers.Conv2D(3, 3, padding="same", activation="sigmoid"),
        ]
    )


def transformer():
    inputs = keras.Input((6, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(x, x)])
    x = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def convolutions():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            *[layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(3)],
            layers.Conv2D(3, 3, padding="same", activation="tanh"),
        ]
    )


MODELS = {
    "convolutions": (convolutions, keras.losses.MeanSquaredError()),
    "lenet": (lenet, CROSS_ENTROPY),
    "residual": (residual, CROSS_ENTROPY),
    "autoencoder": (autoencoder, keras.losses.MeanSquaredError()),
    "transformer": (transformer, CROSS_ENTROPY),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.001),
    "adamw": lambda: keras.optimizers.AdamW(0.001, clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.001),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
}


def batches(model, loss, steps=STEPS):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(BATCH, *model.input_shape[1:])).astype(np.float32)
        sparse = loss is CROSS_ENTROPY
        yield x, rng.integers(0, 10, BATCH).astype(np.int32) if sparse else np.tanh(np.abs(x))


def train_keras(model, loss, optimizer, perturbed=False):
    """Losses of the steps, and all variables at the end."""
    model.compile(optimizer, loss)
    optimizer.build(model.trainable_variables)
    if perturbed:
        rng = np.random.default_rng(1)
        for v in model.trainable_variables:
            eps = np.finfo(np.float32).eps * rng.choice([-1, 1], v.shape)
            v.assign(v.numpy() * (1 + eps).astype(np.float32))
    losses = [model.train_on_batch(x, y) for x, y in batches(model, loss)]
    return losses, [v.numpy() for v in model.variables]


def train_litert(path, model, loss, rate):
    interpreter = litert.Interpreter(str(path))
    train = interpreter.get_signature_runner("train")
    losses = [
        float(train(x=x, y=y, learning_rate=np.float32(rate))["loss"])
        for x, y in batches(model, loss)
    ]
    return losses, interpreter.get_signature_runner("get_weights")(**NOTHING)


def fresh(name):
    keras.utils.set_random_seed(0)
    build, loss = MODELS[name]
    return build(), loss


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        ("convolutions", "momentum"),
        ("convolutions", "adam"),
        ("lenet", "sgd"),
        ("lenet", "adamw"),
        ("lenet", "rmsprop"),
        ("residual", "momentum"),
        ("residual", "adam"),
        ("autoencoder", "adam"),
        ("autoencoder", "adagrad"),
        ("transformer", "momentum"),
    ],
)
def test_trains_as_keras(name, optimizer, tmp_path, monkeypatch):
    """Within what rounding makes of it.

    How far rounding carries is measured: by the same training in Keras from weights that differ
    by one unit in the last place. Each step of the device rounds anew, in another order, so
    that it may go as far in each of them.
    """
    if name == "convolutions":
        monkeypatch.setattr(exporting, "_OPERATOR", 0)  # that samples are trained one by one
    model, loss = fresh(name)
    path = tmp_path / "model.tflite"
    tflite_tools.export(model, path, loss=loss, optimizer=OPTIMIZERS[optimizer](), batch_size=BATCH)
    expected, variables = train_keras(model, loss, OPTIMIZERS[optimizer]())
    other = fresh(name)[0]
    spread, other_variables = train_keras(other, loss, OPTIMIZERS[optimizer](), perturbed=True)
    rate = float(OPTIMIZERS[optimizer]().learning_rate)
    losses, found = train_litert(path, model, loss, rate)

    assert losses[-1] != losses[0]
    eps = np.finfo(np.float32).eps
    distance = np.max(np.abs(np.subtract(expected, spread)))
    assert np.max(np.abs(np.subtract(losses, expected))) <= STEPS * (
        distance + 4 * eps * expected[0]
    )
    named = [value for key, value in in_order(path, found) if not key.startswith("optimizer/")]
    apart = max(np.abs(a - b).max() for a, b in zip(variables, other_variables, strict=True))
    worst = max(np.abs(a - b).max() for a, b in zip(named, variables, strict=True))
    assert worst <= STEPS * (apart + 4 * eps)


def in_order(path, weights):
    names = [v["name"] for v in manifest.of(path)["variables"]]
    return [(name, weights[name]) for name in names]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    keras.utils.set_random_seed(0)
    model = lenet()
    path = tmp_path_factory.mktemp("export") / "lenet.tflite"
    result = tflite_tools.export(
        model,
        path,
        loss="sparse_categorical_crossentropy",
        optimizer="adam",
        batch_size=BATCH,
        metrics=["sparse_categorical_accuracy"],
        sample_weight=True,
    )
    return model, path, result


def data(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, 12, 12, 1)).astype(np.float32),
        "y": rng.integers(0, 10, BATCH).astype(np.int32),
        "sample_weight": np.ones(BATCH, np.float32),
    }


def test_builtin_operators_only(exported):
    model = flatbuffer.read(exported[1])
    assert not [
        flatbuffer.op_name(model, op)
        for subgraph in model.subgraphs
        for op in subgraph.operators
        if flatbuffer.is_custom(model, op)
    ]


def test_any_signature_may_come_first(exported):
    """The weights the model had are in the file, whatever is called first."""
    model, path, _ = exported
    x = data()["x"]
    for first in ("infer", "get_weights", "train", "evaluate"):
        interpreter = litert.Interpreter(str(path))
        arguments = {
            "infer": {"x": x},
            "get_weights": NOTHING,
            "train": {**data(), "learning_rate": np.float32(0.0)},
            "evaluate": data(),
        }[first]
        interpreter.get_signature_runner(first)(**arguments)
        output = interpreter.get_signature_runner("infer")(x=x)["output"]
        assert np.allclose(output, model(x), atol=1e-5)


def test_weights_in_and_out_bit_for_bit(exported):
    _, path, result = exported
    one, two = (litert.Interpreter(str(path)) for _ in range(2))
    rate = {"learning_rate": np.float32(0.01)}
    train = one.get_signature_runner("train")
    for seed in range(3):
        train(**data(seed), **rate)
    weights = one.get_signature_runner("get_weights")(**NOTHING)
    assert list(weights)
    assert set(weights) == {v["name"] for v in result.manifest["variables"]}
    assert any(name.startswith("optimizer/") for name in weights)
    two.get_signature_runner("set_weights")(**weights)
    for seed in range(3, 6):
        assert train(**data(seed), **rate) == two.get_signature_runner("train")(
            **data(seed), **rate
        )
    both = [i.get_signature_runner("get_weights")(**NOTHING) for i in (one, two)]
    assert all(np.array_equal(both[0][name], both[1][name]) for name in weights)


def test_reset(exported):
    interpreter = litert.Interpreter(str(exported[1]))
    get = interpreter.get_signature_runner("get_weights")
    before = {name: value.copy() for name, value in get(**NOTHING).items()}
    interpreter.get_signature_runner("train")(**data(), learning_rate=np.float32(0.1))
    assert any(not np.array_equal(before[name], value) for name, value in get(**NOTHING).items())
    interpreter.get_signature_runner("reset")(**NOTHING)
    assert all(np.array_equal(before[name], value) for name, value in get(**NOTHING).items())


def test_sample_weights(exported):
    evaluate = litert.Interpreter(str(exported[1])).get_signature_runner("evaluate")
    full = evaluate(**data())["loss"]
    halved = evaluate(**{**data(), "sample_weight": np.full(BATCH, 0.5, np.float32)})["loss"]
    assert halved == full / 2


def test_scheduled(exported):
    train = exported[2].scheduled["train"]
    assert train.after < train.before


def test_frozen_layers_stay(tmp_path):
    model, loss = fresh("lenet")
    model.layers[0].trainable = False
    path = tmp_path / "frozen.tflite"
    tflite_tools.export(model, path, loss=loss, optimizer="sgd", batch_size=BATCH)
    _, weights = train_litert(path, model, loss, 0.1)
    kernel, other = model.layers[0].kernel, model.layers[2].kernel
    assert np.array_equal(weights[kernel.path], kernel)
    assert not np.array_equal(weights[other.path], other)


def test_dropout_draws_anew_in_training_only(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_OPERATOR", 0)  # that samples are trained one by one
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64), layers.Dropout(0.5), layers.Dense(10)]
    )
    path = tmp_path / "dropout.tflite"
    tflite_tools.export(model, path, loss="mse", optimizer="sgd", batch_size=BATCH)
    interpreter = litert.Interpreter(str(path))
    x, y = np.ones((BATCH, 64), np.float32), np.ones((BATCH, 10), np.float32)
    train = interpreter.get_signature_runner("train")
    losses = [float(train(x=x, y=y, learning_rate=np.float32(0))["loss"]) for _ in range(4)]
    assert len(set(losses)) == 4
    infer = interpreter.get_signature_runner("infer")
    assert np.allclose(infer(x=x)["output"], model(x), atol=1e-5)


def test_an_unsupported_layer_is_named(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            layers.Conv2D(4, 3),
            layers.Conv2D(4, 3, data_format="channels_first", name="turned"),
        ]
    )
    with pytest.raises(tflite_tools.UnsupportedError, match=r"turned.*channels first"):
        tflite_tools.export(
            model, tmp_path / "no.tflite", loss="mse", optimizer="sgd", batch_size=BATCH
        )
    assert not list(tmp_path.iterdir())


def test_an_operation_the_converter_does_not_know_is_named(tmp_path):
    class Odd(layers.Layer):
        def call(self, x):
            return tf.math.lgamma(x)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(2), Odd(name="odd")])
    with pytest.raises(tflite_tools.UnsupportedError, match=r"odd.*gamma"):
        tflite_tools.export(
            model, tmp_path / "no.tflite", loss="mse", optimizer="sgd", batch_size=BATCH
        )
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    path = tmp_path / "there.tflite"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        tflite_tools.export(lenet(), path, loss="mse", optimizer="sgd", batch_size=BATCH)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_batch_sizes(tmp_path, batch_size):
    with pytest.raises(ValueError, match="whole number from 1"):
        tflite_tools.export(
            lenet(), tmp_path / "no.tflite", loss="mse", optimizer="sgd", batch_size=batch_size
        )


def test_half_precision_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="mixed_float16")])
    with pytest.raises(ValueError, match="float32"):
        tflite_tools.export(
            model, tmp_path / "no.tflite", loss="mse", optimizer="sgd", batch_size=BATCH
        )


def test_the_model_is_left_as_it_was(exported):
    model = exported[0]
    assert not model.compiled
    assert all(v.shape == tuple(np.shape(v)) for v in model.variables)
    tf.debugging.assert_all_finite(model(data()["x"]), "")


def test_variables_are_read_first_and_written_once(exported):
    """An interpreter plans no memory beyond a read, and what it planned before stays."""
    graph = train_graph(exported[1])
    first = ("CALL_ONCE", "VAR_HANDLE", "READ_VARIABLE")
    # After the checks of shapes.
    names = itertools.dropwhile(lambda name: name in ("SLICE", "RESHAPE"), graph.names)
    kinds = [name in first for name in names]
    assert kinds == sorted(kinds, reverse=True)
    assert 0 < graph.names.count("READ_VARIABLE") <= graph.names.count("VAR_HANDLE")
    assert graph.names.count("ASSIGN_VARIABLE") <= graph.names.count("VAR_HANDLE")


def train_graph(path):
    file = flatbuffer.read(path)
    (number,) = [
        s.subgraphIndex for s in file.signatureDefs if flatbuffer.text(s.signatureKey) == "train"
    ]
    return Graph(file, number)


def test_small_batches_are_taken_apart_where_that_takes_less(tmp_path, monkeypatch):
    model, loss = fresh("convolutions")
    path = tmp_path / "model.tflite"

    def convolutions():
        result = tflite_tools.export(
            model, path, loss=loss, optimizer="sgd", batch_size=BATCH, overwrite=True
        )
        return train_graph(path).names.count("CONV_2D"), result.scheduled["train"]

    # Of a model as small as this one, operators take more than activations.
    assert convolutions()[0] < BATCH * (4 + 4 + 3)
    monkeypatch.setattr(exporting, "_OPERATOR", 0)
    count, scheduled = convolutions()
    # Each sample has convolutions of its own, forward and backward.
    assert count >= BATCH * (4 + 4 + 3)
    assert scheduled.after < scheduled.before / 2


def test_a_time_budget_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ratio from 1"):
        tflite_tools.export(
            lenet(),
            tmp_path / "model.tflite",
            loss=CROSS_ENTROPY,
            optimizer="sgd",
            batch_size=BATCH,
            time_budget=0.5,
        )


def of_tokens():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(20, 6),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def recurrent(layer):
    return keras.Sequential([keras.Input((5, 3)), layer, layers.Dense(1)])


def grouped():
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(8, 3),
            layers.GroupNormalization(2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (of_tokens, "sgd"),
        (of_tokens, "adam"),
        (lambda: recurrent(layers.LSTM(4, unroll=True)), "adam"),
        (lambda: recurrent(layers.GRU(4, unroll=True)), "adam"),
        (lambda: recurrent(layers.SimpleRNN(4, unroll=True)), "momentum"),
        (grouped, "adam"),
    ],
    ids=["embedding-sgd", "embedding-adam", "lstm", "gru", "rnn", "groups"],
)
def test_verified(build, optimizer, tmp_path):
    keras.utils.set_random_seed(0)
    model, path = build(), tmp_path / "model.tflite"
    model.compile(OPTIMIZERS[optimizer](), "mse")
    tflite_tools.export(model, path, loss="mse", optimizer=model.optimizer, batch_size=BATCH)
    verified = tflite_tools.verify(path, model, steps=3, measured=False)
    assert verified.ok, verified.render()


def absolute(y, prediction):
    return tf.reduce_mean(tf.abs(y - prediction), -1)


@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        ("softmax", keras.losses.SparseCategoricalCrossentropy()),
        ("softmax", keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        (None, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        ("softmax", keras.losses.CategoricalCrossentropy(label_smoothing=0.1)),
        (None, keras.losses.CategoricalCrossentropy(from_logits=True)),
        ("sigmoid", keras.losses.BinaryCrossentropy()),
        (None, keras.losses.BinaryCrossentropy(from_logits=True)),
        ("sigmoid", "binary_crossentropy"),
        ("tanh", keras.losses.MeanSquaredError(reduction="sum")),
        ("tanh", "mean_absolute_error"),
        (None, keras.losses.Huber(0.3)),
        (None, absolute),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "name", getattr(x, "__name__", "logits")),
)
def test_losses(activation, loss, tmp_path):
    keras.utils.set_random_seed(0)
    # Large logits, from which Keras takes its loss, not from probabilities near 0 and 1.
    scale = 30.0 if activation in ("softmax", "sigmoid") else 1.0
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Rescaling(scale),
            layers.Dense(8, "relu", name="lambda"),
            layers.Dense(3, activation),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), loss)
    path = tmp_path / "model.tflite"
    tflite_tools.export(model, path, loss=loss, optimizer=model.optimizer, batch_size=BATCH)
    verified = tflite_tools.verify(path, model, steps=3, measured=False)
    assert verified.ok, verified.render()


@pytest.mark.parametrize(
    ("build", "optimizer", "says"),
    [
        (lambda: recurrent(layers.LSTM(4)), "sgd", "unroll=True"),
        (of_tokens, "rmsprop", "embedding"),
        (
            lenet,
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
            "accumulated gradients",
        ),
        (
            lenet,
            keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
            "schedule",
        ),
    ],
    ids=["loop", "sparse", "accumulation", "schedule"],
)
def test_what_would_train_otherwise_is_refused(build, optimizer, says, tmp_path):
    """A change of a variable that cannot be written is not left out."""
    path = tmp_path / "model.tflite"
    with pytest.raises(ValueError, match=says):
        tflite_tools.export(build(), path, loss="mse", optimizer=optimizer, batch_size=BATCH)
    assert not path.exists()
