"""What a file is said to take, and the command line that says it."""

from __future__ import annotations

import json

import keras
import pytest
import tensorflow as tf
from keras import layers

import tflite_tools
from tflite_tools import cli


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16, 16, 3))
    for _ in range(4):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    path = tmp_path_factory.mktemp("inspection") / "model.tflite"
    tflite_tools.export(model, path, loss="mse", optimizer="sgd", batch_size=4)
    return path


def test_the_peak_is_that_of_the_tensors_alive(file):
    (train,) = [i for i in tflite_tools.inspect(file) if i.name == "train"]
    assert train.peak == train.held[train.at[0]]
    # A kernel's scratch memory is not a tensor.
    assert 0 < sum(t.nbytes for t in train.alive) <= train.peak
    activation = 4 * 16 * 16 * 8 * 4
    assert train.alive[0].nbytes >= activation
    # An exported file is scheduled already.
    assert train.peak_scheduled <= train.peak < 4 * 4 * activation
    assert not train.custom
    assert sum(train.operators.values()) == len(train.held)


def test_command_line(file, tmp_path, capsys):
    assert cli.main(["inspect", str(file), "--signature", "train", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["peak"] == max(shown["held"])
    plot = tmp_path / "train.png"
    assert cli.main(["inspect", str(file), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "alive at the peak" in capsys.readouterr().out
    other = tmp_path / "other.tflite"
    assert cli.main(["schedule", str(file), str(other)]) == 0
    assert "train" in capsys.readouterr().out
    assert cli.main(["schedule", str(file), str(other)]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert cli.main(["schedule", str(file), str(other), "--overwrite", "--time-budget", "1.2"]) == 0
    assert cli.main(["schedule", str(file), str(other), "--overwrite", "--time-budget", "0.2"]) == 2
    assert "ratio from 1" in capsys.readouterr().err
    assert cli.main(["inspect", str(file), "--signature", "no"]) == 2
    assert "it has" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "missing.tflite")]) == 2


def test_a_custom_operator_is_reported(tmp_path, capsys):
    @tf.function(input_signature=[tf.TensorSpec((2, 3))])
    def fn(x):
        return tf.math.betainc(x, x, x)

    converter = tf.lite.TFLiteConverter.from_concrete_functions([fn.get_concrete_function()])
    converter.allow_custom_ops = True
    path = tmp_path / "custom.tflite"
    path.write_bytes(converter.convert())
    assert cli.main(["inspect", str(path)]) == 1
    assert "Betainc" in capsys.readouterr().err
