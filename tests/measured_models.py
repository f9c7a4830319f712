"""Models that child processes of `measure` and the command build by name."""

import keras
import numpy as np
from keras import layers


def small():
    """A small network and fewer samples than a batch."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="conv"),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="conv_1"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).random((5, 16, 16, 3), dtype=np.float32)
    return model, x, np.arange(5) % 3


def wide():
    """Activations that are large next to the model, all behind ReLUs."""
    hidden = [layers.Dense(1024, activation="relu", name=f"hidden_{i}") for i in range(6)]
    model = keras.Sequential([keras.Input((1024,)), *hidden, layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).random((64, 1024), dtype=np.float32)
    return model, x, np.zeros((64, 1), np.float32)


def sparse_dense():
    """A layer of its own kind keeps a ReLU's output dense."""
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv"),
            layers.Lambda(lambda t: t * t, name="square"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", "mse")
    return model, np.ones((4, 32, 32, 3), np.float32), np.zeros((4, 3), np.float32)


def not_compiled():
    model, x, y = small()
    return keras.Sequential(model.layers), x, y


def breaks():
    raise RuntimeError("this model cannot be built")
