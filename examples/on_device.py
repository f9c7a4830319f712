"""Train on one machine, go on training on another: half the digits in Keras, all in LiteRT.

The model that leaves for the device has seen the digits 0 to 4 only. There it trains on all ten,
from the file alone, and the weights come back into Keras. Accuracy at each stage, and memory.
"""

import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras import layers

import tflite_tools
from examples.digits import load

BATCH, KNOWN = 16, 5
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build():
    inputs = keras.Input((32, 32, 1))
    x = inputs
    for filters in (16, 32, 32):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.MaxPooling2D(2)(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def pretrained(x, y):
    """The model that leaves for the device."""
    model = build()
    model.compile(keras.optimizers.Adam(2e-3), LOSS)
    few = y < KNOWN
    model.fit(x[few], y[few], batch_size=BATCH, epochs=5, verbose=0)
    return model


def main():
    keras.utils.set_random_seed(0)
    (x, y), (x_test, y_test) = load()
    y, y_test = y.astype(np.int32), y_test.astype(np.int32)

    def accuracy(logits):
        return f"{np.mean(np.argmax(logits, -1) == y_test):.1%} of the test digits right"

    model = pretrained(x, y)
    print(f"in Keras, trained on 0 to {KNOWN - 1}: {accuracy(model.predict(x_test, verbose=0))}")

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "digits.tflite")
        exported = tflite_tools.export(
            model, path, loss=LOSS, optimizer=model.optimizer, batch_size=BATCH
        )
        train = exported.scheduled["train"]
        print(
            f"exported: {exported.nbytes / 1e6:.1f} MB, {train.operators} operators a step, "
            f"{train.after / 1e6:.1f} MB live at most, {train.before / 1e6:.1f} as converted"
        )

        trainer = tflite_tools.Trainer(path)
        print(f"in LiteRT, before training: {accuracy(trainer.infer(x_test))}")
        order = np.random.default_rng(0).permutation(len(x) // BATCH * BATCH).reshape(-1, BATCH)
        trainer.fit([(x[batch], y[batch]) for batch in order], epochs=4, progress=False)
        print(f"in LiteRT, trained on all ten: {accuracy(trainer.infer(x_test))}")

        # The file's variables go by the names they have in Keras.
        weights = trainer.weights()
        for variable in model.variables:
            if variable.path in weights:
                variable.assign(weights[variable.path])
        print(f"back in Keras: {accuracy(model.predict(x_test, verbose=0))}")

        measured = tflite_tools.measure(path, steps=3)
        print(
            f"training in LiteRT took {measured.peak / 1e6:.0f} MB at its peak, all of the "
            f"interpreter included, and {measured.cpu * 1e3:.0f} ms CPU a step"
        )


if __name__ == "__main__":
    main()
