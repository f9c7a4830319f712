"""A transformer encoder for the benchmarks: `"benchmarks.transformer:encoder"` for `bt.measure`."""

import keras
import numpy as np

_CLASSES, _VOCABULARY = 10, 1000


def encoder(sequence=256, width=256, heads=4, blocks=4, samples=64):
    """The compiled model and random data, a sequence of tokens to a class.

    It has no dropout: what draws random numbers again when it is recomputed would be measured
    with it, and EfficientNetB0 shows that already.
    """
    layers = keras.layers
    tokens = keras.Input((sequence,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, width, name="tokens")(tokens)
    x = Positions(name="embedded")(x)
    for i in range(blocks):
        x = block(x, width, heads, f"block{i + 1}")
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    x = layers.Dense(_CLASSES, activation="softmax", name="predictions")(x)
    model = keras.Model(tokens, x, name="encoder")
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    return (
        model,
        rng.integers(0, _VOCABULARY, (samples, sequence), dtype=np.int32),
        rng.integers(0, _CLASSES, samples),
    )


def small():
    """The same in small, for a smoke test."""
    return encoder(sequence=16, width=32, heads=2, blocks=2, samples=16)


def block(x, width, heads, name):
    """Attention and a network of two layers, each behind a normalization, each around a sum."""
    layers = keras.layers
    y = layers.LayerNormalization(name=f"{name}_norm1")(x)
    y = layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y)
    x = layers.Add(name=f"{name}_add1")([x, y])
    y = layers.LayerNormalization(name=f"{name}_norm2")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{name}_dense1")(y)
    y = layers.Dense(width, name=f"{name}_dense2")(y)
    return layers.Add(name=f"{name}_add2")([x, y])


@keras.saving.register_keras_serializable("benchmarks")
class Positions(keras.layers.Layer):
    """Adds a trained vector for each position."""

    def build(self, input_shape):
        """Make the vectors."""
        self.positions = self.add_weight(shape=input_shape[1:], initializer="uniform")

    def call(self, x):
        """`x` with them."""
        return x + self.positions
