"""Verifying says yes of what trains as Keras does, and no of what does not."""

from __future__ import annotations

import json
import math

import keras
import numpy as np
import pytest
from keras import layers

pytest.importorskip("ai_edge_litert")
import tflite_tools
from tflite_tools import cli
from tflite_tools.rules import registry

BATCH = 4


def build(rate=0.0, channels=4):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dropout(rate)(x) if rate else x
    x = layers.Conv2D(channels, 3, activation="relu")(x)
    outputs = layers.Dense(3, activation="tanh")(layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


def export(model, path, loss="mse"):
    tflite_tools.export(model, path, loss=loss, optimizer=model.optimizer, batch_size=BATCH)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return export(build(), tmp_path_factory.mktemp("verify") / "model.tflite")


def test_what_trains_as_keras_does(file):
    model = build()
    before = [v.numpy() for v in model.variables]
    verified = tflite_tools.verify(file, model, steps=3, measured=False)
    assert verified.ok
    assert verified.steps == 3
    assert not verified.custom
    assert not verified.missing
    compared = {d.what for d in verified.worst}
    assert {"loss", "output"} < compared
    assert any("moving_mean" in name for name in compared)
    assert any(name.startswith("optimizer/") for name in compared)
    assert all(0 < d.tolerance < 1e-2 for d in verified.worst if d.difference)
    assert "trains as Keras does" in verified.render()
    for v, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), value)


def test_a_gradient_that_is_off(tmp_path, monkeypatch):
    """By one part in a thousand; losses are right until the second step."""
    right = registry.find("ReluGrad")
    monkeypatch.setitem(registry._RULES, "ReluGrad", lambda *given: right(*given) * 1.001)
    path = export(build(), tmp_path / "model.tflite")
    verified = tflite_tools.verify(path, build(), steps=1, measured=False)
    assert not verified.ok
    assert "DOES NOT" in verified.render()
    assert {d.what for d in verified.worst if d.ratio <= 1} >= {"loss"}
    assert verified.worst[0].ratio > 1


def test_another_loss(tmp_path):
    def off(y, prediction):
        return keras.losses.mean_squared_error(y, prediction) * 1.001

    path = export(build(), tmp_path / "model.tflite", loss=off)
    verified = tflite_tools.verify(path, build(), steps=1, measured=False)
    assert not verified.ok
    assert any(d.what == "loss" and d.ratio > 1 for d in verified.worst)


def test_a_difference_without_tolerance_is_one():
    assert tflite_tools.verification.Difference("x", 1, 1.0, 0.0).ratio == math.inf
    assert tflite_tools.verification.Difference("x", 1, 0.0, 0.0).ratio == 0


def test_data_of_ones_own(file):
    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(BATCH, 8, 8, 3)).astype("f"), rng.normal(size=(BATCH, 3)).astype("f"))
        for _ in range(2)
    ]
    verified = tflite_tools.verify(file, build(), steps=5, data=batches, measured=False)
    assert verified.ok
    assert verified.steps == 2


def test_what_cannot_be_compared(file, tmp_path):
    other = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(3)])
    other.compile("adam", "mse")
    with pytest.raises(ValueError, match="another model"):
        tflite_tools.verify(file, other)
    model = build()
    bare = keras.Model(model.inputs, model.outputs)
    with pytest.raises(ValueError, match="not compiled"):
        tflite_tools.verify(file, bare)
    dropping = build(rate=0.5)
    path = export(dropping, tmp_path / "dropping.tflite")
    with pytest.raises(ValueError, match="random"):
        tflite_tools.verify(path, dropping)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_truncated_file(file, keep, tmp_path):
    content = file.read_bytes()
    broken = tmp_path / "broken.tflite"
    broken.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(tflite_tools.FileFormatError):
        tflite_tools.verify(broken, build())


def test_command_line(file, tmp_path, capsys):
    saved = tmp_path / "model.keras"
    build().save(saved)
    command = ["verify", str(file), "--model", str(saved), "--steps", "2", "--no-measure"]
    assert cli.main(command) == 0
    assert "trains as Keras does" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    wider = tmp_path / "wider.keras"
    build(channels=5).save(wider)
    assert cli.main(["verify", str(file), "--model", str(wider), "--no-measure"]) == 2
    assert "tflite-tools:" in capsys.readouterr().err
