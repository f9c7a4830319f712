"""`make bench-on-device`: what training files take in LiteRT, into docs/on-device.md.

Each model as whole batches and as `export` writes it, with and without a schedule. The files as the
converter makes them have no order of ours and keep everything; the interpreter's default delegate
may have them.
"""

import argparse
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from keras import layers
from rich.console import Console

import tflite_tools
from tflite_tools import exporting, microbatches, scheduling
from tflite_tools import flatbuffer as fb
from tflite_tools.training import Training

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "on-device.md"
_MARKER = "<!-- bench -->"
_CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def lenet():
    """28x28, batch 8."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )


def autoencoder():
    """32x32, batch 8."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
            layers.UpSampling2D(2),
            layers.Conv2D(3, 3, padding="same", activation="sigmoid"),
        ]
    )


def convolutions():
    """12 x 32 channels, 64x64, batch 4."""
    inputs = x = keras.Input((64, 64, 3))
    for _ in range(12):
        x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet8():
    """64x64, batch 8."""

    def conv_bn(x, filters, stride=1, size=3):
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input((64, 64, 3))
    x = layers.ReLU()(conv_bn(inputs, 16))
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        shortcut = x if stride == 1 else conv_bn(x, filters, stride, size=1)
        y = layers.ReLU()(conv_bn(x, filters, stride))
        x = layers.ReLU()(layers.Add()([conv_bn(y, filters), shortcut]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def mobilenet_v2():
    """96x96, alpha 0.35, batch 8."""
    return keras.applications.MobileNetV2(
        input_shape=(96, 96, 3), alpha=0.35, weights=None, classes=10, classifier_activation=None
    )


# Batch size and loss of each.
MODELS = {
    lenet: (8, _CROSS_ENTROPY),
    autoencoder: (8, keras.losses.MeanSquaredError()),
    convolutions: (4, _CROSS_ENTROPY),
    resnet8: (8, _CROSS_ENTROPY),
    mobilenet_v2: (8, _CROSS_ENTROPY),
}


def files(build, folder):
    """The variants of one model: their names and where they are."""
    batch_size, loss = MODELS[build]

    def training():
        keras.utils.set_random_seed(0)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        return Training(build(), loss, optimizer, {}, batch_size, False)

    for kind, parts in (("dense", 1), ("divided", microbatches.count(batch_size))):
        of = training()
        file = exporting.converted(of, parts)
        exporting.describe(file, of)
        path = folder / f"{kind}.tflite"
        fb.write(file, path)
        yield f"{kind}, unscheduled", path
        if kind == "dense":
            scheduling.schedule(path, folder / "scheduled.tflite")
            yield "dense, scheduled", folder / "scheduled.tflite"
    of, path = training(), folder / "exported.tflite"
    tflite_tools.export(of.model, path, loss=loss, optimizer=of.optimizer, batch_size=batch_size)
    yield "as exported", path


_COLUMNS = ("dense, unscheduled", "dense, scheduled", "divided, unscheduled", "as exported")


def row(build):
    """A line of the table."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in files(build, pathlib.Path(folder)):
            measured[kind] = tflite_tools.measure(path)
    peaks = [f"{measured[kind].peak / 1e6:.1f}" for kind in _COLUMNS]
    ours, dense = measured["as exported"], measured["dense, scheduled"]
    whole = measured["dense, unscheduled"]
    ratios = [f"{ours.peak / x.peak:.2f}" for x in (whole, dense)]
    name = f"{build.__name__}, {build.__doc__.rstrip('.')}"
    return [name, *peaks, *ratios, f"{ours.cpu / dense.cpu:.2f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(f.__name__ for f in MODELS)}")
    parser.add_argument("--dry-run", action="store_true", help="print, leave the document alone")
    options = parser.parse_args()
    chosen = [f for f in MODELS if not options.models or f.__name__ in options.models]
    lines = [
        f"| | {' | '.join(_COLUMNS)} | of unscheduled | of scheduled | CPU, of scheduled |",
        "|---" + "|---:" * (len(_COLUMNS) + 3) + "|",
    ]
    for build in chosen:
        Console(stderr=True).print(build.__name__)
        lines.append(f"| {' | '.join(row(build))} |")
    print("\n".join(lines))
    if not options.dry_run:
        before, _, after = DOCUMENT.read_text().split(_MARKER)
        text = "\n".join(["", *lines, ""])
        DOCUMENT.write_text(_MARKER.join([before, text, after]))


if __name__ == "__main__":
    main()
