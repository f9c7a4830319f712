"""What users of training on the device reported, as tests; the public issue is in each docstring.

Those of losses, gradients and layers at large are in `test_export.py` and `test_rules.py`.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

pytest.importorskip("ai_edge_litert")
from ai_edge_litert import interpreter as litert

import bittrain_tf as bt
import tflite_tools
from tflite_tools import cli, exporting
from tflite_tools import flatbuffer as fb

BATCH = 4


def sequential(*stack, shape=(8, 8, 3)):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(shape), *stack])


def convolutional(activation, *pooling):
    return sequential(
        layers.Conv2D(4, 3, activation=activation),
        layers.BatchNormalization(),
        *pooling,
        layers.Flatten(),
        layers.Dense(3),
    )


def export(model, path, optimizer="sgd", loss="mse", **options):
    model.compile(optimizer, loss)
    return tflite_tools.export(
        model, path, loss=loss, optimizer=model.optimizer, batch_size=BATCH, **options
    )


def verify(path, model, steps=3):
    verified = tflite_tools.verify(path, model, steps=steps, measured=False)
    assert verified.ok, verified.render()
    return verified


def batch(count, shape=(8, 8, 3), outputs=3, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(count, *shape)).astype(np.float32),
        rng.normal(size=(count, outputs)).astype(np.float32),
    )


@pytest.mark.parametrize("activation", ["sigmoid", "tanh"])
def test_training_does_not_die(activation, tmp_path):
    """tensorflow#54001: converted with BN, tanh, sigmoid or AvgPool, and died when it was run."""
    path = tmp_path / "model.tflite"
    model = convolutional(activation, layers.AveragePooling2D(2))
    export(model, path)
    tflite_tools.measure(path, steps=20)  # in a process of its own; an error if that dies
    verify(path, model, steps=20)


@pytest.mark.parametrize("activation", ["relu", "relu6", "gelu"])
def test_gradients_are_builtin(activation, tmp_path):
    """tensorflow#55748, #54244, #60845: ReluGrad, Conv2DBackpropFilter and others needed Flex."""
    path = tmp_path / "model.tflite"
    export(convolutional(activation, layers.MaxPooling2D(3, 2, padding="same")), path, "adam")
    file = fb.read(path)
    assert not [name for graph in file.subgraphs for name in fb.custom_names(file, graph)]


class TestOtherBatchSizes:
    """tensorflow#55551: a batch of another size failed in RESHAPE, or was allocated as none."""

    @pytest.fixture(
        scope="class",
        params=[
            [layers.Flatten],
            [lambda: layers.Reshape((36, 4)), lambda: layers.Dense(2), layers.Flatten],
            [layers.GlobalAveragePooling2D],
            [layers.BatchNormalization, layers.GlobalAveragePooling2D],
        ],
        ids=["flatten", "reshape", "pooling", "normalization"],
    )
    def exported(self, request, tmp_path_factory):
        path = tmp_path_factory.mktemp("batch") / "model.tflite"
        inner = [make() for make in request.param]
        model = sequential(layers.Conv2D(4, 3, activation="relu"), *inner, layers.Dense(3))
        export(model, path, "adam")
        return model, path

    def test_the_size_is_declared(self, exported):
        model, path = exported
        trainer = tflite_tools.Trainer(path)
        assert trainer.manifest["batch_size"] == BATCH
        for count in (32, 7, 1):
            with pytest.raises(ValueError, match=r"x has shape .* it must be \[4, 8, 8, 3\]"):
                trainer.train_step(*batch(count))
            x, _ = batch(count)
            # Inference pads the last batch.
            np.testing.assert_allclose(trainer.infer(x), model(x), rtol=0, atol=1e-5)
        trainer.train_step(*batch(BATCH))

    def test_interpreters_refuse_others(self, exported):
        """The interpreter resizes its inputs to what it is given, and would train on less."""
        _, path = exported
        interpreter = litert.Interpreter(str(path))
        train = interpreter.get_signature_runner("train")
        weights = interpreter.get_signature_runner("get_weights")
        nothing = np.zeros(1, np.float32)
        before = {k: v.copy() for k, v in weights(nothing=nothing).items()}
        for count in (32, 7, 1):
            x, y = batch(count)
            with pytest.raises(RuntimeError, match="failed to prepare"):
                train(x=x, y=y, learning_rate=np.float32(1e-3))
            after = weights(nothing=nothing)
            assert all(np.array_equal(before[k], v) for k, v in after.items())
        # The same interpreter goes on with batches of its size.
        x, y = batch(BATCH)
        loss = train(x=x, y=y, learning_rate=np.float32(1e-3))["loss"]
        assert loss == tflite_tools.Trainer(path).train_step(x, y)["loss"]

    def test_where_others_would_not_fail(self, tmp_path, monkeypatch):
        """Of images only, divided: four times as many have gradients four times as large."""
        monkeypatch.setattr(exporting, "_OPERATOR", 0)  # that samples are trained one by one
        path = tmp_path / "model.tflite"
        export(sequential(layers.Conv2D(4, 3, padding="same"), layers.Conv2D(3, 1)), path)
        interpreter = litert.Interpreter(str(path))
        rate = np.float32(0.1)
        for shape in ((4 * BATCH, 8, 8, 3), (BATCH, 16, 8, 3), (BATCH, 8, 16, 3)):
            x = np.ones(shape, np.float32)
            for name, more in (("train", {"learning_rate": rate}), ("evaluate", {})):
                with pytest.raises(RuntimeError, match="failed to prepare"):
                    interpreter.get_signature_runner(name)(x=x, y=x, **more)
        x = np.ones((BATCH, 8, 8, 3), np.float32)
        with pytest.raises(RuntimeError, match="failed to prepare"):
            interpreter.get_signature_runner("train")(
                x=x, y=x, learning_rate=np.array([0, 0.1, 1], np.float32)
            )


@pytest.mark.parametrize(
    "optimizer",
    [lambda: keras.optimizers.SGD(0.01, momentum=0.9), lambda: keras.optimizers.Adam(1e-3)],
    ids=["momentum", "adam"],
)
def test_three_steps_and_three_are_six(optimizer, tmp_path):
    """tensorflow#91686: the recipe's save failed on Keras 3, and left the optimizer out."""
    path, saved = tmp_path / "model.tflite", tmp_path / "weights.safetensors"
    export(convolutional("relu", layers.MaxPooling2D(2)), path, optimizer())
    straight, first, second = (tflite_tools.Trainer(path) for _ in range(3))
    losses = [straight.train_step(*batch(BATCH, seed=k)) for k in range(6)]
    resumed = [first.train_step(*batch(BATCH, seed=k)) for k in range(3)]
    first.save(saved)
    second.load(saved)
    resumed += [second.train_step(*batch(BATCH, seed=k)) for k in range(3, 6)]
    assert resumed == losses
    weights = second.weights()
    assert sum(name.startswith("optimizer/") and value.any() for name, value in weights.items()) > 3
    for name, value in straight.weights().items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_statistics_of_normalization(tmp_path):
    """tensorflow#47765, #43833: the converter rejected the variables that BN training writes."""
    path = tmp_path / "model.tflite"
    model = convolutional("relu")
    export(model, path)
    verified = verify(path, model, steps=10)
    compared = {difference.what for difference in verified.worst}
    assert {"moving_mean", "moving_variance"} <= {name.split("/")[-1] for name in compared}
    # Inference is by them: with others, it makes something else.
    trainer = tflite_tools.Trainer(path)
    x, _ = batch(BATCH)
    before, weights = trainer.infer(x), trainer.weights()
    weights = {k: v + 1 if "moving_mean" in k else v for k, v in weights.items()}
    trainer.set_weights(weights)
    assert not np.allclose(trainer.infer(x), before, atol=1e-3)


def test_compiled_model_api(tmp_path):
    """google-ai-edge/LiteRT#7367: the newer API rejected the tensors that stand for variables."""
    compiled = pytest.importorskip("ai_edge_litert.compiled_model")
    path = tmp_path / "model.tflite"
    export(convolutional("relu", layers.MaxPooling2D(2)), path, "adam")
    model = compiled.CompiledModel.from_file(str(path))

    def run(name, **arrays):
        index = model.get_signature_index(name)
        signature = model.get_signature_by_index(index)
        inputs, outputs = model.create_input_buffers(index), model.create_output_buffers(index)
        for key, buffer in zip(signature["inputs"], inputs, strict=True):
            buffer.write(arrays[key])
        model.run_by_index(index, inputs, outputs)
        return dict(zip(signature["outputs"], outputs, strict=True))

    trainer = tflite_tools.Trainer(path)
    for seed in range(5):
        x, y = batch(BATCH, seed=seed)
        outputs = run("train", x=x, y=y, learning_rate=np.float32([1e-3]))
        loss = trainer.train_step(x, y, learning_rate=1e-3)["loss"]
        np.testing.assert_allclose(outputs["loss"].read(1, np.float32)[0], loss, rtol=1e-4)
    for name, buffer in run("get_weights", nothing=np.zeros(1, np.float32)).items():
        value = trainer.weights()[name]
        if value.dtype == np.float32:  # buffers give no int64
            read = buffer.read(value.size, np.float32).reshape(value.shape)
            np.testing.assert_allclose(read, value, rtol=0, atol=1e-4, err_msg=name)
    # The signatures share what was trained.
    found = run("infer", x=x)["output"].read(BATCH * 3, np.float32).reshape(BATCH, 3)
    np.testing.assert_allclose(found, trainer.infer(x), rtol=0, atol=1e-3)
    assert not np.allclose(found, tflite_tools.Trainer(path).infer(x), atol=1e-3)


def test_a_quantized_model_trains_what_is_left(tmp_path):
    """tensorflow#52145, #62996: quantized in one signature only, and not to be trained."""
    model = sequential(
        layers.Flatten(), layers.Dense(16, activation="relu"), layers.Dense(3), shape=(6, 2)
    )
    model.quantize("int8")
    path = tmp_path / "model.tflite"
    assert all(v.dtype == "float32" for v in model.trainable_variables)
    export(model, path)
    dtypes = {v["name"]: v["dtype"] for v in tflite_tools.manifest.of(path)["variables"]}
    assert {v.path for v in model.trainable_variables} <= {
        k for k, d in dtypes.items() if d == "float32"
    }
    trainer = tflite_tools.Trainer(path)
    x, y = batch(BATCH, (6, 2))
    # The same model in all signatures, before training and after.
    for _ in range(3):
        loss = trainer.evaluate(x, y)["loss"]
        assert loss == pytest.approx(trainer.train_step(x, y)["loss"], rel=1e-5)
        expected = np.mean((trainer.infer(x) - y) ** 2)
        assert trainer.evaluate(x, y)["loss"] == pytest.approx(expected, rel=1e-5)
        assert expected < loss


def unet():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    left = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D(2)(left))
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.Concatenate()([left, x])
    return keras.Model(inputs, layers.Conv2D(1, 1)(x))


def encoder():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4)(x, x)])
    x = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


@pytest.mark.parametrize("build", [unet, encoder])
def test_resizing_and_attention(build, tmp_path):
    """onnxruntime#16866, #22465: no gradients of Resize, nor of what BERT is made of."""
    path = tmp_path / "model.tflite"
    model = build()
    export(model, path, "adam")
    verify(path, model)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Conv2D(8, 3, groups=2),
        lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
        lambda: layers.SeparableConv2D(6, 3, depth_multiplier=2),
        lambda: layers.DepthwiseConv2D(3, dilation_rate=2),
        lambda: layers.Resizing(5, 6),
    ],
    ids=["groups", "multiplier", "separable", "dilated", "resizing"],
)
@pytest.mark.slow  # their gradients are in test_rules.py
def test_less_common_layers(layer, tmp_path):
    path = tmp_path / "model.tflite"
    model = sequential(
        layers.Conv2D(4, 3, activation="relu"), layer(), layers.Flatten(), layers.Dense(3)
    )
    export(model, path)
    verify(path, model)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_inputs_of_other_types(dtype, tmp_path):
    """Of which the batch is taken apart."""
    inputs = keras.Input((6,), dtype=dtype)
    x = layers.Embedding(2, 4)(inputs) if dtype == "int64" else keras.ops.cast(inputs, "float32")
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
    path = tmp_path / "model.tflite"
    export(model, path)
    x = np.random.default_rng(0).integers(0, 2, (BATCH, 6)).astype(dtype)
    found = tflite_tools.Trainer(path).infer(x)
    np.testing.assert_allclose(found, model(x), rtol=0, atol=1e-5)


def test_adapted_statistics(tmp_path):
    path = tmp_path / "model.tflite"
    normalization = layers.Normalization()
    normalization.adapt(3 + 5 * batch(64, (6,))[0])
    model = keras.Sequential([keras.Input((6,)), normalization, layers.Dense(3)])
    export(model, path)
    verify(path, model)


def test_control_flow_in_a_function_is_named(tmp_path):
    class Branching(layers.Layer):
        @tf.function
        def call(self, x):
            return x if tf.reduce_sum(x) > 0 else 2 * x

    model = sequential(layers.Dense(4), Branching(), layers.Dense(3), shape=(6,))
    with pytest.raises(tflite_tools.UnsupportedError, match="depends on data"):
        export(model, tmp_path / "model.tflite")


def test_a_compressed_model(tmp_path):
    """What trains in less memory here is exported as what it is: the same file, and verified."""
    stock, compressed = (convolutional("relu", layers.MaxPooling2D(2)) for _ in range(2))
    bt.compress(compressed)
    paths = [tmp_path / "stock.tflite", tmp_path / "compressed.tflite"]
    written = [export(m, p) for m, p in zip((stock, compressed), paths, strict=True)]
    operators = [
        {name: s.operators for name, s in exported.scheduled.items()} for exported in written
    ]
    assert operators[0] == operators[1]
    verify(paths[1], compressed)
    assert "compressed" in {layer.status for layer in bt.report(compressed).layers}  # as it was


def test_command_line(tmp_path, capsys):
    model = convolutional("relu")
    bare, saved, path = (tmp_path / n for n in ("bare.keras", "model.keras", "model.tflite"))
    model.save(bare)
    model.compile("adam", "mse")
    model.save(saved)
    command = ["export", str(saved), str(path), "--batch-size", "4"]
    assert cli.main([*command, "--metric", "mean_absolute_error"]) == 0
    assert "train" in capsys.readouterr().out
    assert set(tflite_tools.Trainer(path).evaluate(*batch(4))) == {"loss", "mean_absolute_error"}
    assert cli.main(command) == 2
    assert "overwrite" in capsys.readouterr().err
    assert cli.main([*command, "--optimizer", "sgd", "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == "SGD"
    assert cli.main(["export", str(bare), str(path), "--batch-size", "4", "--overwrite"]) == 2
    assert "--loss and --optimizer" in capsys.readouterr().err
    assert cli.main(["verify", str(path), "--model", str(saved), "--no-measure"]) == 2
    assert "variables" in capsys.readouterr().err
