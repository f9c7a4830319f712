"""The runner: trains, checks what it is given, and keeps what it has learned."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tflite_tools

BATCH = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )
    path = tmp_path_factory.mktemp("trainer") / "model.tflite"
    tflite_tools.export(
        model,
        path,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(0.02),
        batch_size=BATCH,
        metrics=["sparse_categorical_accuracy"],
    )
    return path


def dataset(batches=12):
    """Which of three numbers is the largest."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(batches):
        x = rng.normal(size=(BATCH, 6)).astype(np.float32)
        made.append((x, x[:, :3].argmax(1).astype(np.int32)))
    return made


def test_fit_learns(file):
    trainer = tflite_tools.Trainer(file)
    history = trainer.fit(dataset(), epochs=15, progress=False)
    assert len(history["loss"]) == 15
    assert history["loss"][-1] < history["loss"][0] / 2
    x, y = (np.concatenate(arrays) for arrays in zip(*dataset(), strict=True))
    accuracy = np.mean(trainer.infer(x).argmax(1) == y)
    assert accuracy > 0.9
    assert trainer.evaluate(*dataset()[0])["sparse_categorical_accuracy"] > 0.8


@pytest.mark.parametrize("count", [1, BATCH, BATCH + 3])
def test_any_number_of_samples_is_inferred(file, count):
    trainer = tflite_tools.Trainer(file)
    x = np.random.default_rng(0).normal(size=(count, 6)).astype(np.float32)
    output = trainer.infer(x)
    assert output.shape == (count, 3)
    assert np.allclose(output[-1], trainer.infer(x[-1:])[0], atol=1e-6)


def test_a_checkpoint_resumes_bit_for_bit(file, tmp_path):
    one, two = tflite_tools.Trainer(file), tflite_tools.Trainer(file)
    for batch in dataset(3):
        one.train_step(*batch)
    one.save(tmp_path / "weights.safetensors")
    two.load(tmp_path / "weights.safetensors")
    assert [one.train_step(*batch) for batch in dataset(3)] == [
        two.train_step(*batch) for batch in dataset(3)
    ]
    for name, value in one.weights().items():
        assert np.array_equal(value, two.weights()[name])


def test_a_checkpoint_is_not_overwritten(file, tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"mine")
    trainer = tflite_tools.Trainer(file)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trainer.save(path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(tflite_tools.FileFormatError, match="safetensors"):
        trainer.load(path)
    trainer.save(path, overwrite=True)
    trainer.load(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_checkpoint_broken_off_leaves_the_old_one(file, tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    trainer = tflite_tools.Trainer(file)
    trainer.save(path)
    before = path.read_bytes()
    trainer.train_step(*dataset(1)[0])

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        trainer.save(path, overwrite=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.zeros((3, 6), np.float32), np.zeros(3, np.int32)), r"x has shape \[3, 6\].*\[8, 6\]"),
        ((np.zeros((8, 6), np.float32), np.zeros(8, np.float32)), "y is float32.*int32"),
        ((np.zeros((8, 6), np.float32),), "train takes x, y, learning_rate"),
    ],
)
def test_wrong_arrays_are_refused_before_anything_runs(file, batch, message):
    trainer = tflite_tools.Trainer(file)
    before = trainer.weights()
    with pytest.raises(ValueError, match=message):
        trainer.train_step(*batch)
    assert all(np.array_equal(before[n], v) for n, v in trainer.weights().items())


def test_wrong_weights_are_refused(file):
    trainer = tflite_tools.Trainer(file)
    weights = trainer.weights()
    name = next(iter(weights))
    with pytest.raises(ValueError, match=f"missing .*{name}"):
        trainer.set_weights({k: v for k, v in weights.items() if k != name})
    with pytest.raises(ValueError, match="shape"):
        trainer.set_weights({**weights, name: weights[name][:1]})


def test_a_generator_is_used_up_after_one_epoch(file):
    trainer = tflite_tools.Trainer(file)
    with pytest.raises(ValueError, match="epoch 2"):
        trainer.fit(iter(dataset(2)), epochs=2, progress=False)


def test_reset(file):
    trainer = tflite_tools.Trainer(file)
    first = [trainer.train_step(*batch) for batch in dataset(3)]
    trainer.reset()
    assert [trainer.train_step(*batch) for batch in dataset(3)] == first


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "model.tflite"
    path.write_bytes(b"\0" * 100)
    with pytest.raises(tflite_tools.FileFormatError, match=r"not a \.tflite file"):
        tflite_tools.Trainer(path)


def test_any_damage_to_a_file_is_an_error(file, tmp_path):
    """Before the interpreter sees it: that can take the process down."""
    content = file.read_bytes()
    rng = np.random.default_rng(0)
    broken = tmp_path / "broken.tflite"
    for _ in range(200):
        damaged = bytearray(content)
        # Not in the seal itself, without which a file is as one of another writer.
        at = rng.integers(0, len(content) - 40)
        damaged[at] ^= int(rng.integers(1, 256))
        broken.write_bytes(damaged)
        with pytest.raises(tflite_tools.FileFormatError):
            tflite_tools.Trainer(broken)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
def test_a_truncated_file(file, tmp_path, keep):
    broken = tmp_path / "broken.tflite"
    broken.write_bytes(file.read_bytes()[: int(keep * file.stat().st_size)])
    with pytest.raises(tflite_tools.FileFormatError):
        tflite_tools.Trainer(broken)
