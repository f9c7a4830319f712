"""What files of real models are to hold: operators, exactness, state, memory; in LiteRT."""

from __future__ import annotations

import pathlib
import sys

import keras
import numpy as np
import pytest
from processes import python

pytest.importorskip("ai_edge_litert")
import tflite_tools
from benchmarks import on_device
from bittrain_tf.analysis import rss
from tflite_tools import flatbuffer as fb

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}
BUILDS = {
    build.__name__: build
    for build in (
        on_device.lenet,
        on_device.autoencoder,
        on_device.resnet8,
        on_device.mobilenet_v2,
    )
}


def built(name, optimizer):
    """The model, compiled."""
    keras.utils.set_random_seed(0)
    model = BUILDS[name]()
    _, loss = on_device.MODELS[BUILDS[name]]
    model.compile(OPTIMIZERS[optimizer](), loss)
    return model


def export(model, path, batch_size):
    tflite_tools.export(
        model, path, loss=model.loss, optimizer=model.optimizer, batch_size=batch_size
    )
    return path


def run(script, *arguments):
    """In a process of its own.

    Where operations are to be deterministic, as in these tests, TensorFlow makes cross-entropy of
    others, and the batch is not divided.
    """
    tests = str(pathlib.Path(__file__).parent)
    ran = python("-c", f"import sys\n{script}", *arguments, timeout=1800, PYTHONPATH=tests)
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", BUILDS)
def test_training(name, optimizer, tmp_path):
    run("import test_device_goals as goals; goals.train(*sys.argv[1:])", name, optimizer, tmp_path)


def train(name, optimizer, folder):
    """In batches of 2, which what is shown here does not depend on: thousands of steps are run."""
    model = built(name, optimizer)
    path = export(model, pathlib.Path(folder, "model.tflite"), 2)
    file = fb.read(path)
    assert not [name for graph in file.subgraphs for name in fb.custom_names(file, graph)]

    verified = tflite_tools.verify(path, model, steps=50, measured=False)
    assert verified.steps == 50
    assert verified.ok, verified.render()

    check_state_goes_out_and_in(path)
    check_memory_stays_flat(path)


def check_state_goes_out_and_in(path):
    """Slots of the optimizer, too: the next steps are the same, bit for bit."""
    one, two = tflite_tools.Trainer(path), tflite_tools.Trainer(path)
    data = batches(one, 6)
    for batch in data[:3]:
        one.train_step(*batch)
    two.set_weights(one.weights())
    assert [one.train_step(*b) for b in data[3:]] == [two.train_step(*b) for b in data[3:]]
    weights = two.weights()
    for name, value in one.weights().items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def check_memory_stays_flat(path):
    trainer = tflite_tools.Trainer(path)
    data = batches(trainer, 10)

    def train(steps):
        for step in range(steps):
            trainer.train_step(*data[step % len(data)], learning_rate=1e-5)
        return rss.resident()

    before = train(200)
    # Half a kilobyte a step would be as much: less than a leak of any of its tensors.
    assert train(2000) - before < 1 << 20


def batches(trainer, count):
    *specs, _ = trainer.manifest["signatures"]["train"]["inputs"]
    rng = np.random.default_rng(0)
    return [
        [
            rng.integers(0, 10, spec["shape"]).astype(np.int32)
            if spec["dtype"] == "int32"
            else rng.random(spec["shape"], np.float32)
            for spec in specs
        ]
        for _ in range(count)
    ]


# The most that training may take in LiteRT, in bytes; and of what our own file takes that keeps
# everything, in the converter's order and in the best that there is.
PEAKS = {"convolutions": 40e6}
SHARES = {"resnet8": (None, 0.62), "mobilenet_v2": (0.40, 0.85)}


def peak(path):
    """Of three processes the least: how much of LiteRT's library is in memory is chance."""
    return min(tflite_tools.measure(path, steps=3).peak for _ in range(3))


def files(name, folder):
    """As the benchmark writes them."""
    script = (
        "import pathlib; from benchmarks import on_device;"
        "list(on_device.files(getattr(on_device, sys.argv[1]), pathlib.Path(sys.argv[2])))"
    )
    run(script, name, folder)


@pytest.mark.parametrize("name", PEAKS)
def test_peak(name, tmp_path):
    files(name, tmp_path)
    assert peak(tmp_path / "exported.tflite") <= PEAKS[name]


@pytest.mark.parametrize("name", SHARES)
def test_share(name, tmp_path):
    files(name, tmp_path)
    exported = peak(tmp_path / "exported.tflite")
    unscheduled, scheduled = SHARES[name]
    assert exported <= scheduled * peak(tmp_path / "scheduled.tflite")
    if unscheduled is not None:
        assert exported <= unscheduled * peak(tmp_path / "dense.tflite")
