"""The C++ example trains as `Trainer` does, and both examples call things by their names."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import ai_edge_litert
import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers
from processes import ROOT, python

import tflite_tools

MOBILE = ROOT / "examples" / "mobile"
LIBRARY = pathlib.Path(ai_edge_litert.__path__[0], "libLiteRt.so")
BATCH, RATE = 8, 0.01

# Printed with 7 digits; and the two APIs may divide a sum among threads in their own ways.
close = {"rel": 1e-5}


def documented(word):
    """The commands of the README's block that has `word` in it."""
    blocks = re.findall(r"```bash\n(.*?)```", (MOBILE / "README.md").read_text(), re.S)
    (found,) = [block for block in blocks if word in block]
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("no g++")
    if not LIBRARY.exists():
        pytest.skip(f"this ai-edge-litert has no {LIBRARY.name}")
    version = importlib.metadata.version("ai-edge-litert")
    if tuple(map(int, version.split(".")[:2])) < (2, 3):
        pytest.skip(f"litert_c.h is not for ai-edge-litert {version}")
    folder = tmp_path_factory.mktemp("program")
    build = documented("g++").replace("/tmp/digits", str(folder)).splitlines()[:-1]
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", "\n".join(build)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "train"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and more digits than fill its batches."""
    folder = tmp_path_factory.mktemp("folder")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    tflite_tools.export(
        model,
        folder / "model.tflite",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(RATE),
        batch_size=BATCH,
        metrics=["sparse_categorical_accuracy"],
    )
    rng = np.random.default_rng(0)
    for part, count in {"train": 5 * BATCH + 3, "test": 4 * BATCH + 5}.items():
        y = rng.integers(0, 10, count)
        x = rng.random((count, 8, 8, 1)) + (np.arange(8) == y[:, None])[:, :, None, None]
        x.astype("<f4").tofile(folder / f"{part}_x.f32")
        y.astype("<i4").tofile(folder / f"{part}_y.i32")
    return folder


def data(folder, part):
    x = np.fromfile(folder / f"{part}_x.f32", "<f4").reshape(-1, 8, 8, 1)
    return x, np.fromfile(folder / f"{part}_y.i32", "<i4")


def batches(folder):
    x, y = data(folder, "train")
    starts = range(0, len(y) - BATCH + 1, BATCH)
    return [(x[start : start + BATCH], y[start : start + BATCH]) for start in starts]


def accuracy(trainer, folder):
    x, y = data(folder, "test")
    return np.mean(trainer.infer(x).argmax(1) == y)


def run(program, *arguments):
    return subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def trained(program, folder, checkpoint, epochs):
    """What the program prints: losses, accuracies, and test accuracies before and after."""
    options = ("--epochs", epochs, "--learning-rate", RATE)
    result = run(program, folder / "model.tflite", folder, checkpoint, *options)
    assert result.returncode == 0, result.stderr[-2000:]
    steps = re.findall(r"^epoch .*: loss (\S+), accuracy (\S+)$", result.stdout, re.M)
    tests = re.findall(r"test accuracy (\S+)$", result.stdout, re.M)
    losses, accuracies = (list(map(float, column)) for column in zip(*steps, strict=True))
    return losses, accuracies, list(map(float, tests))


def test_trains_as_trainer_does(program, folder, tmp_path):
    losses, accuracies, tests = trained(program, folder, tmp_path / "checkpoint", 2)
    trainer = tflite_tools.Trainer(folder / "model.tflite")
    before = accuracy(trainer, folder)
    history = trainer.fit(batches(folder), epochs=2, learning_rate=RATE, progress=False)
    assert losses == pytest.approx(history["loss"], **close)
    assert accuracies == pytest.approx(history["sparse_categorical_accuracy"], **close)
    assert tests == pytest.approx([before, accuracy(trainer, folder)], **close)
    assert losses[1] < losses[0]


def test_goes_on_from_a_checkpoint(program, folder, tmp_path):
    checkpoint, straight = tmp_path / "checkpoint", tmp_path / "straight"
    _, _, first = trained(program, folder, checkpoint, 1)
    losses, _, second = trained(program, folder, checkpoint, 1)
    trained(program, folder, straight, 2)

    trainer = tflite_tools.Trainer(folder / "model.tflite")
    history = trainer.fit(batches(folder), epochs=2, learning_rate=RATE, progress=False)
    assert losses[0] == pytest.approx(history["loss"][1], **close)
    assert second[0] == first[1]
    assert checkpoint.read_bytes() == straight.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "straight"]


def test_trainer_reads_a_checkpoint(program, folder, tmp_path):
    trained(program, folder, tmp_path / "checkpoint", 1)
    trainer = tflite_tools.Trainer(folder / "model.tflite")
    trainer.fit(batches(folder), learning_rate=RATE, progress=False)
    expected = trainer.weights()
    assert expected["optimizer/iteration"] == 5
    trainer.reset()
    trainer.load(tmp_path / "checkpoint")
    for name, value in trainer.weights().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("damage", ["cut off", "too long", "foreign", "empty"])
def test_a_damaged_checkpoint_is_refused(program, folder, tmp_path, damage):
    checkpoint = tmp_path / "checkpoint"
    trained(program, folder, checkpoint, 1)
    whole = checkpoint.read_bytes()
    content = {
        "cut off": whole[:-4],
        "too long": whole + bytes(4),
        "foreign": whole.replace(b"kernel", b"barrel"),
        "empty": b"",
    }[damage]
    checkpoint.write_bytes(content)
    result = run(program, folder / "model.tflite", folder, checkpoint)
    assert result.returncode == 1
    assert f"{checkpoint} ({len(content)} bytes) is not a whole checkpoint" in result.stderr
    assert checkpoint.read_bytes() == content
    assert not result.stdout


@pytest.mark.parametrize("content", ["cut off", "foreign", "missing"])
def test_a_damaged_model_is_refused(program, folder, tmp_path, content):
    model = tmp_path / "model.tflite"
    if content == "cut off":
        whole = (folder / "model.tflite").read_bytes()
        model.write_bytes(whole[: len(whole) // 2])
    elif content == "foreign":
        model.write_bytes(bytes(10000))
    result = run(program, model, folder, tmp_path / "checkpoint")
    assert result.returncode == 1
    assert re.search(rf"error: .*{model}.*(Export it|Is it there)", result.stderr)


def test_data_of_another_model_are_refused(program, folder, tmp_path):
    for file in folder.glob("*_?.*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "train_x.f32").write_bytes(bytes(4000))
    result = run(program, folder / "model.tflite", tmp_path, tmp_path / "checkpoint")
    assert result.returncode == 1
    assert "the model takes 64 numbers a label" in result.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["a", "b"], ["a", "b", "c", "--epoch", "1"], ["a", "b", "c", "--epochs", "x"]]
)
def test_wrong_arguments_are_refused(program, arguments):
    result = run(program, *arguments)
    assert result.returncode == 1
    assert re.match("error: (Usage:|--epochs takes)", result.stderr)


@pytest.fixture(scope="module")
def names(folder):
    """Inputs and outputs of each signature of the file."""
    signatures = Interpreter(str(folder / "model.tflite")).get_signature_list()
    return {
        key: {"input": set(tensors["inputs"]), "output": set(tensors["outputs"])}
        for key, tensors in signatures.items()
    }


def test_names_in_the_cpp_example_exist(names):
    code = (MOBILE / "train.cc").read_text()
    signatures = dict(re.findall(r'(\w+_)\(runtime, "(\w+)"\)', code))
    assert signatures.keys() == {"train_", "infer_", "get_", "set_"}
    tensors = re.findall(r'(\w+_)\.(input|output)\("(\w+)"\)', code)
    assert len(tensors) == len(re.findall(r'\.(?:in|out)put\("', code)) > 6
    for member, kind, name in tensors:
        assert name in names[signatures[member]][kind], (member, kind, name)


def test_names_in_the_kotlin_example_exist(names):
    code = (MOBILE / "DigitsTrainer.kt").read_text()
    tensors = re.findall(r'= (input|output)\("(\w+)", "(\w+)"\)', code)
    for kind, signature, name in tensors:
        assert name in names[signature][kind], (kind, signature, name)

    taken = {signature: set() for signature in names}
    for signature, arguments in re.findall(r'run\(\s*"(\w+)",(.*?)\n? *\)\n', code, re.S):
        taken[signature] |= set(re.findall(r'"(\w+)" to', arguments))
    for signature in ("train", "infer"):
        assert taken[signature] == names[signature]["input"] | names[signature]["output"]
    assert taken["get_weights"] == names["get_weights"]["input"]
    # The rest of get_weights and set_weights is by what the file itself says.
    assert set(re.findall(r'getSignatureInputs\("(\w+)"\)', code)) == {"set_weights"}
    assert names["set_weights"]["input"] == names["get_weights"]["output"]


def exported(folder):
    command = documented("examples.mobile.export").split()[1:-1]
    return python(*command, folder)


def test_export_overwrites_nothing(tmp_path):
    (tmp_path / "digits.tflite").write_bytes(b"mine")
    result = exported(tmp_path)
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["digits.tflite"]


@pytest.mark.slow
def test_the_digits_are_learned(program, tmp_path):
    folder = tmp_path / "digits"
    result = exported(folder)
    assert result.returncode == 0, result.stderr[-3000:]
    result = run(program, folder / "digits.tflite", folder, tmp_path / "checkpoint")
    assert result.returncode == 0, result.stderr[-3000:]
    before, after = map(float, re.findall(r"test accuracy (\S+)$", result.stdout, re.M))
    assert before < 0.55  # half of the digits have never been seen
    assert after > 0.7
