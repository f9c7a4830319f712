"""The one call: compress a model, then train it as before."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import bittrain_tf as bt
from examples.digits import load


def main():
    (x, y), (x_test, y_test) = load()
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.002), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )

    print(f"stock:      {kept(model, x, y):.1f} MB of activations kept for the backward pass")
    bt.compress(model)  # in place: same layers, same weights, same optimizer
    print(f"compressed: {kept(model, x, y):.1f} MB")

    model.fit(x, y, batch_size=64, epochs=4, verbose=0)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"test loss {loss:.3f}, test accuracy {accuracy:.3f}")


def kept(model, x, y):
    return bt.analyze(model, x[:64], y[:64]).kept_bytes / 1e6


if __name__ == "__main__":
    main()
