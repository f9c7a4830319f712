"""A training loop of one's own: `tf.GradientTape` and `tf.function`, stock and compressed."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import bittrain_tf as bt
from examples.digits import load


def build():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3, seed=0),
            layers.Dense(10),
        ]
    )


def train(model, batches):
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return [float(step(x, y)) for x, y in batches]


def main():
    tf.config.experimental.enable_op_determinism()
    (x, y), _ = load()
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True)

    stock = train(build(), batches)
    # Compress before the step is traced: a tf.function of yours keeps what it has traced.
    compressed = train(bt.compress(build()), batches)

    for i in range(0, len(stock), 5):
        print(f"step {i:2d}  stock {stock[i]:.6f}  compressed {compressed[i]:.6f}")
    print("the same losses, bit for bit:", stock == compressed)


if __name__ == "__main__":
    main()
