"""Write what the C++ and the Kotlin example train: the digits model, and the digits as raw files.

The model has seen the digits 0 to 4 only, as in `examples.on_device`.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras

import tflite_tools
from examples.digits import load
from examples.on_device import BATCH, LOSS, pretrained


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="a new or an empty one")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty. Name a new folder, nothing is overwritten.")

    keras.utils.set_random_seed(0)
    train, test = load()
    model = pretrained(*train)
    tflite_tools.export(
        model,
        folder / "digits.tflite",
        loss=LOSS,
        optimizer=model.optimizer,
        batch_size=BATCH,
        metrics=["sparse_categorical_accuracy"],
    )
    for name, (x, y) in {"train": train, "test": test}.items():
        x.astype("<f4").tofile(folder / f"{name}_x.f32")
        y.astype("<i4").tofile(folder / f"{name}_y.i32")
    sizes = ", ".join(f"{p.name} {p.stat().st_size / 1e6:.2f} MB" for p in sorted(folder.iterdir()))
    print(f"{folder}: {sizes}")


if __name__ == "__main__":
    main()
