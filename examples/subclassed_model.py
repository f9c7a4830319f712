"""A subclassed model with control flow and a `train_step` of its own."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf

import bittrain_tf as bt
from examples.digits import load


class Autoencoder(keras.Model):
    """Denoises digits; every layer is called where Python code says so."""

    def __init__(self):
        super().__init__()
        layers, options = keras.layers, {"strides": 2, "padding": "same", "activation": "relu"}
        self.down = [layers.Conv2D(width, 3, **options) for width in (16, 32)]
        self.up = [layers.Conv2DTranspose(width, 3, **options) for width in (32, 16)]
        self.out = layers.Conv2D(1, 3, padding="same", activation="sigmoid")

    def call(self, x):
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x)
        for layer in self.up:
            skip = skips.pop()
            x = layer(x)
            if skip.shape[-1] == x.shape[-1]:
                x = x + skip
        return self.out(x)

    def train_step(self, data):
        noisy = tf.clip_by_value(data + tf.random.normal(tf.shape(data), 0, 0.3), 0, 1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(noisy, training=True) - data) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"mse": loss}


def main():
    (x, _), _ = load()
    keras.utils.set_random_seed(0)
    model = Autoencoder()
    model(x[:1])  # compress wants a model that is built
    model.compile(keras.optimizers.Adam(0.003))

    before = model.fit(x, batch_size=64, epochs=2, verbose=0).history["mse"]
    bt.compress(model)  # half-way through training is fine
    after = model.fit(x, batch_size=64, epochs=2, verbose=0).history["mse"]
    print("stock:     ", *(f"mse {loss:.4f}" for loss in before))
    print("compressed:", *(f"mse {loss:.4f}" for loss in after))
    bt.restore(model)
    print("restored:", type(model.down[0]) is keras.layers.Conv2D)


if __name__ == "__main__":
    main()
