"""Small models of the kinds people train, each with data, and ways to train and compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

BATCH_SIZE = 4


class Task(NamedTuple):
    """A model, not compiled, a batch of data and the loss to train it with."""

    model: keras.Model
    x: Any
    y: np.ndarray
    loss: Any

    def compile(self, **options: Any) -> Task:
        """Compile with SGD and momentum, a rate small enough to stay far from chaos."""
        optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
        self.model.compile(**{"optimizer": optimizer, "loss": self.loss, **options})
        return self


def _images(size: int = 16, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(7)
    return rng.random((BATCH_SIZE, size, size, channels), dtype=np.float32)


def _labels(classes: int = 3) -> np.ndarray:
    return np.arange(BATCH_SIZE) % classes


def _classification(model: keras.Model, x: Any) -> Task:
    return Task(model, x, _labels(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def resnet() -> Task:
    """Stem, an identity block and a projection block."""

    def conv_bn(x, filters, stride=1, size=3):
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((16, 16, 3))
    x = layers.ReLU()(conv_bn(inputs, 8))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for filters, stride in ((8, 1), (16, 2)):
        shortcut = x if stride == 1 else conv_bn(x, filters, stride, size=1)
        y = layers.ReLU()(conv_bn(x, filters, stride))
        x = layers.ReLU()(layers.Add()([conv_bn(y, filters), shortcut]))
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    return _classification(keras.Model(inputs, outputs), _images())


def mobilenet_v2() -> Task:
    """Inverted residuals: depthwise convolutions and ReLU6."""

    def block(x, filters, stride):
        y = layers.Conv2D(4 * x.shape[-1], 1, use_bias=False)(x)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        if stride == 2:
            y = layers.ZeroPadding2D(((0, 1), (0, 1)))(y)
        padding = "same" if stride == 1 else "valid"
        y = layers.DepthwiseConv2D(3, stride, padding=padding, use_bias=False)(y)
        y = layers.ReLU(6.0)(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 1, use_bias=False)(y))
        return layers.Add()([x, y]) if stride == 1 else y

    inputs = keras.Input((16, 16, 3))
    x = layers.ReLU(6.0)(layers.Conv2D(6, 3, 2, padding="same")(inputs))
    x = block(block(x, 6, 1), 8, 2)
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    return _classification(keras.Model(inputs, outputs), _images())


def densenet() -> Task:
    """Two dense blocks of concatenations with a transition between."""

    def bn_relu_conv(x, filters, size):
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return layers.Conv2D(filters, size, padding="same", use_bias=False)(x)

    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(6, 3, 2, padding="same")(inputs)
    for _ in range(2):
        x = layers.Concatenate()([x, bn_relu_conv(bn_relu_conv(x, 8, 1), 4, 3)])
    x = layers.AveragePooling2D(2)(bn_relu_conv(x, 6, 1))
    x = layers.Concatenate()([x, bn_relu_conv(x, 4, 3)])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    return _classification(keras.Model(inputs, outputs), _images())


def unet() -> Task:
    """Encoder and decoder joined by concatenations; no normalization."""
    inputs = keras.Input((16, 16, 3))
    skips = []
    x = inputs
    for filters in (4, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    for filters, skip in ((8, skips[1]), (4, skips[0])):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    outputs = layers.Conv2D(1, 1)(x)
    x = _images()
    return Task(keras.Model(inputs, outputs), x, x.mean(-1, keepdims=True), "mse")


def autoencoder() -> Task:
    """Strided convolutions down, transposed convolutions up."""
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(6, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(8, 3, 2, padding="same"),
            layers.LeakyReLU(0.1),
            layers.Conv2DTranspose(6, 3, 2, padding="same", activation="relu"),
            layers.Conv2DTranspose(3, 3, 2, padding="same"),
        ]
    )
    x = _images()
    return Task(model, x, x, "mse")


def mlp() -> Task:
    """Three dense layers."""
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32, activation="relu"),
            layers.Dense(32, activation="relu"),
            layers.Dense(3),
        ]
    )
    return _classification(model, _images(2))._replace(x=_images(2).reshape(BATCH_SIZE, 12))


def lstm() -> Task:
    """Embedding with a mask, LSTM, a dense head."""
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(11, 8, mask_zero=True),
            layers.LSTM(8),
            layers.Dense(16, activation="relu"),
            layers.Dense(3),
        ]
    )
    tokens = np.random.default_rng(7).integers(0, 11, (BATCH_SIZE, 6)).astype("int32")
    return _classification(model, tokens)


def two_tower() -> Task:
    """One tower applied to two images, by dictionary input."""
    tower = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
        ],
        name="tower",
    )
    inputs = {name: keras.Input((8, 8, 3), name=name) for name in ("left", "right")}
    pair = layers.Multiply()([tower(inputs["left"]), tower(inputs["right"])])
    model = keras.Model(inputs, layers.Dense(1)(pair))
    x = {"left": _images(8), "right": _images(8)[::-1].copy()}
    return Task(model, x, _labels(2).astype("float32")[:, None], "mse")


def transformer() -> Task:
    """One encoder block: attention, GELU, layer normalization."""
    inputs = keras.Input((6, 8))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)])
    y = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(8)(y))])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(x))
    x = np.random.default_rng(7).standard_normal((BATCH_SIZE, 6, 8)).astype("float32")
    return _classification(keras.Model(inputs, outputs), x)


MODELS: dict[str, Callable[[], Task]] = {
    build.__name__: build
    for build in (
        resnet,
        mobilenet_v2,
        densenet,
        unet,
        autoencoder,
        mlp,
        lstm,
        two_tower,
        transformer,
    )
}


@keras.saving.register_keras_serializable("bittrain_tf_tests")
class Penalty(layers.Layer):
    """Adds the mean of the squares of what it passes on to the loss."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def mixture(normalized: bool = True) -> Task:
    """Something of everything: convolutions, dropout, a block, attention, an added loss.

    No tensor has more than two readers that are differentiated: the order in which three
    gradients are added up is a tape's own.

    Args:
        normalized: With batch normalization.
    """
    block_inputs = keras.Input((6, 6, 6), name="block_inputs")
    x = layers.Conv2D(6, 3, padding="same", activation="relu", name="block_conv")(block_inputs)
    x = layers.Dropout(0.2, seed=1, name="block_dropout")(x)
    block = keras.Model(block_inputs, layers.Dense(6, name="block_dense")(x), name="block")

    inputs = keras.Input((8, 8, 3), name="images")
    x = layers.Conv2D(6, 3, name="conv")(inputs)
    x = layers.BatchNormalization(name="normalization")(x) if normalized else x
    x = layers.Dropout(0.2, seed=2, name="dropout")(layers.ReLU(name="relu")(x))
    x = layers.Reshape((36, 6), name="sequence")(block(x))
    query = layers.Dense(6, activation="gelu", name="to_query")(x)
    value = layers.LayerNormalization(name="layer_norm")(layers.Dense(6, name="to_value")(x))
    attention = layers.MultiHeadAttention(2, 3, dropout=0.1, seed=3, name="attention")
    x = layers.Add(name="add")([query, attention(query, value)])
    x = layers.GlobalAveragePooling1D(name="pool")(Penalty(name="penalty")(x))
    x = layers.Dense(8, activation="relu", name="hidden")(x)
    return _classification(keras.Model(inputs, layers.Dense(3, name="head")(x)), _images(8))


def noisy() -> Task:
    """Every kind of layer that draws random numbers or keeps averages."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SpatialDropout2D(0.2, seed=1),
            layers.Conv2D(6, 3),
            layers.GaussianNoise(0.1, seed=2),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=3),
            layers.Dense(3),
        ]
    )
    return _classification(model, _images(8))


def convolutions() -> Task:
    """Two convolutions with ReLU and a dense head: the smallest model worth compressing."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu", name="first"),
            layers.Conv2D(4, 3, activation="relu", name="second"),
            layers.Flatten(),
            layers.Dense(3, name="head"),
        ]
    )
    return _classification(model, _images(8))


def wide_stack(squares: bool = False) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Many wide convolutions, compiled, nearly all of whose memory is ReLU outputs.

    Args:
        squares: Also read each ReLU output by a layer whose gradient keeps it dense.
    """
    inputs = keras.Input((64, 64, 3))
    x, pooled = inputs, []
    for _ in range(24):
        x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
        if squares:
            pooled.append(layers.GlobalAveragePooling2D()(layers.Lambda(lambda t: t * t)(x)))
    pooled.append(layers.GlobalAveragePooling2D()(x))
    outputs = layers.Dense(1)(layers.Concatenate()(pooled) if squares else pooled[0])
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    rng = np.random.default_rng(7)
    return model, rng.random((8, 64, 64, 3), dtype=np.float32), np.zeros((8, 1), np.float32)


def wide_stack_with_squares() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """`wide_stack(squares=True)`, by a name of its own."""
    return wide_stack(squares=True)


def seeded(build: Callable[[], Any], seed: int = 0) -> Any:
    """`build()`, always with the same random numbers."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return build()


def train(model: keras.Model, x: Any, y: Any, steps: int = 3) -> list[float]:
    """The loss of each of `steps` steps on one batch."""
    losses = []
    for _ in range(steps):
        losses.append(float(np.ravel(model.train_on_batch(x, y))[0]))
    return losses


def bits(arrays: Sequence[Any]) -> list[bytes]:
    """The arrays, comparable bit for bit."""
    return [np.asarray(a).tobytes() for a in arrays]


def weights(model: keras.Model) -> list[bytes]:
    """All weights, optimizer slots included where there are some, comparable bit for bit."""
    slots = model.optimizer.variables if getattr(model, "optimizer", None) else []
    return bits([*model.get_weights(), *(v.numpy() for v in slots)])
