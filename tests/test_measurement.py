"""What an exported file takes in LiteRT, measured in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import keras
import pytest
from keras import layers

pytest.importorskip("ai_edge_litert")
import tflite_tools
from tflite_tools import exporting
from tflite_tools import flatbuffer as fb
from tflite_tools.training import Training

BATCH = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


def convolutions(normalization):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((64, 64, 3))
    for _ in range(8):
        x = layers.Conv2D(32, 3, padding="same", use_bias=not normalization)(x)
        x = layers.BatchNormalization()(x) if normalization else x
        x = layers.ReLU()(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def dense(path, normalization):
    """The same step as the converter makes it: all kept, in its order."""
    training = Training(
        convolutions(normalization), keras.losses.MeanSquaredError(), _sgd(), {}, BATCH, False
    )
    file = exporting.converted(training, 1)
    exporting.describe(file, training)
    fb.write(file, path)
    return tflite_tools.measure(path, steps=3).peak


def exported(path, normalization, **options):
    tflite_tools.export(
        convolutions(normalization),
        path,
        loss="mse",
        optimizer=_sgd(),
        batch_size=BATCH,
        **options,
    )
    return tflite_tools.measure(path, steps=3).peak


def _sgd():
    return keras.optimizers.SGD(0.01)


@pytest.mark.parametrize("normalization", [False, True])
def test_training_takes_less_memory(tmp_path, normalization):
    """Stock keeps 8 activations of 2.1 MB, with normalization 16, and lays out patches of all.

    Of a network without normalization one sample in four is at work at a time; with it, half of
    what would be kept is made again. LiteRT itself takes some 12 MB in either case.
    """
    before = dense(tmp_path / "dense.tflite", normalization)
    after = exported(tmp_path / "exported.tflite", normalization)
    assert before > 8 * 2.1e6
    assert after < 0.6 * before


def test_delegates_take_more(tmp_path):
    without = exported(tmp_path / "without.tflite", True)
    with_delegate = exported(tmp_path / "with.tflite", True, delegate=True)
    assert without < with_delegate


def test_a_trainer_needs_no_tensorflow():
    code = "import sys, tflite_tools; tflite_tools.Trainer; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
