"""Activity regularizers: what they are worth, their gradients, what they keep, what they do."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_bits, sparse
from keras import layers
from sklearn.datasets import load_digits

import bittrain_tf as bt
import tflite_tools as tt

REGULARIZERS = (bt.ActivityL1, bt.Hoyer)


def _model(regularizer) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(
                16, 3, padding="same", activation="relu", activity_regularizer=regularizer
            ),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def _digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return digits.images[:count, ..., None].astype("float32") / 16, digits.target[:count]


def test_l1_is_that_of_keras():
    x = tf.constant(sparse((4, 5, 3)))
    assert_same_bits(bt.ActivityL1(0.02)(x), keras.regularizers.L1(0.02)(x))


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_hoyer_of_equal_values_is_the_density(scale):
    x = np.zeros((2, 10), "float32")
    x[0, :3], x[1, :7] = scale, -scale
    np.testing.assert_allclose(bt.Hoyer(1.0)(tf.constant(x)), 0.3 + 0.7, rtol=1e-6)


def test_hoyer_of_any_values_is_at_most_the_density():
    x = sparse((1, 40, 10), density=0.4)
    value = float(bt.Hoyer(1.0)(tf.constant(x)))
    values = x[x != 0].astype("float64")
    expected = np.abs(values).sum() ** 2 / (x.size * np.square(values).sum())
    assert value == pytest.approx(expected, rel=1e-5)
    assert value < np.mean(x != 0)


def test_hoyer_of_zeros_is_zero_and_so_is_its_gradient():
    x = tf.zeros((3, 4))
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = bt.Hoyer(1.0)(x)
    assert float(value) == 0
    np.testing.assert_array_equal(tape.gradient(value, x), np.zeros((3, 4)))


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_large_outputs_of_low_precision(regularizer):
    x = tf.constant(sparse((1, 300_000)))
    penalty = regularizer(1.0)(tf.cast(x, tf.float16))
    np.testing.assert_allclose(penalty, regularizer(1.0)(x), rtol=2**-10)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_training_is_that_of_the_stock_model(regularizer):
    x, y = _digits(32)
    stock, compressed = _model(regularizer(0.1)), bt.compress(_model(regularizer(0.1)))
    for _ in range(5):
        assert stock.train_on_batch(x, y) == compressed.train_on_batch(x, y)
    for a, b in zip(compressed.weights, stock.weights, strict=True):
        assert_same_bits(a.value, b.value, a.path)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_keeps_nothing_sparse_as_it_is(regularizer):
    x, y = _digits(32)
    model = bt.compress(_model(regularizer(0.1)))
    assert not bt.analyze(model, x, y).sparse_dense()


def test_the_audit_sees_what_the_regularizer_of_keras_keeps():
    # Else the test above could not fail.
    x, y = _digits(32)
    assert bt.analyze(bt.compress(_model("l1")), x, y).sparse_dense()


@pytest.mark.parametrize(("regularizer", "strength"), [(bt.ActivityL1, 0.001), (bt.Hoyer, 2.0)])
def test_outputs_become_sparser(regularizer, strength):
    x, y = _digits(512)

    def density(strength: float) -> float:
        model = bt.compress(_model(regularizer(strength)))
        model.fit(x, y, epochs=5, verbose=0)
        return float(np.mean(keras.ops.convert_to_numpy(model.layers[0](x)) != 0))

    assert density(strength) < density(0.0) - 0.1


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_files_have_it(regularizer, tmp_path):
    bt.compress(_model(regularizer(0.3))).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").layers[0].activity_regularizer
    assert type(loaded) is regularizer
    assert loaded.strength == 0.3


@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_trains_on_the_device(regularizer, tmp_path):
    model, path = _model(regularizer(0.1)), tmp_path / "model.tflite"
    tt.export(model, path, loss=model.loss, optimizer=model.optimizer, batch_size=4)
    verified = tt.verify(path, reference=model)
    assert verified.ok, verified.render()


@pytest.mark.parametrize("strength", [-1, float("nan"), float("inf"), "l1", None])
def test_other_strengths_are_refused(strength):
    with pytest.raises(ValueError, match="strength must be a finite number"):
        bt.Hoyer(strength)
