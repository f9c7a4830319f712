"""`make demo`: the same network trained stock and compressed, side by side.

A small residual network on scikit-learn's digits, enlarged to 32 x 32. Shows that
the losses agree, what each of the two keeps for its backward pass and the memory
each takes, measured in processes of its own; draws out/demo.png.
"""

import argparse
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bittrain_tf as bt
from bittrain_tf.analysis.kept import rows_table, totals_table
from examples.digits import load

BATCH_SIZE = 128


def build():
    """The compiled model and its training data, as `bt.measure` wants them."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((32, 32, 1))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = residual(x, 32)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(48, 3, padding="same", activation="relu")(x)
    x = residual(x, 48)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x), name="digits")
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    (x, y), _ = load()
    return model, x, y


def residual(x, width):
    """Two convolutions with batch normalization, around which `x` is passed."""
    layers = keras.layers
    shortcut = x
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9, gamma_initializer="zeros")(x)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one epoch of a few images")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("out/demo.png"))
    options = parser.parse_args()
    epochs = 1 if options.quick else options.epochs
    console = Console(width=None if os.isatty(1) else 120)
    tf.config.experimental.enable_op_determinism()

    console.rule("[bold]Training, stock and compressed, from the same seed")
    losses, accuracies, kept = {}, {}, {}
    for kind in ("stock", "compressed"):
        keras.utils.clear_session()  # the same names for the layers of both
        model, x, y = build()
        if kind == "compressed":
            bt.compress(model)  # the one call
        if options.quick:
            x, y = x[: 2 * BATCH_SIZE], y[: 2 * BATCH_SIZE]
        kept[kind] = bt.analyze(model, x[:BATCH_SIZE], y[:BATCH_SIZE])
        losses[kind] = [
            model.fit(x, y, batch_size=64, verbose=0).history["loss"][0]
            for _ in track(range(epochs), f"{kind:<10}", console=console)
        ]
        accuracies[kind] = model.evaluate(*load()[1], verbose=0)[1]
    console.print(loss_table(losses, accuracies))
    console.print(
        "Gradients have the same bits but for batch normalization's, which is summed in another\n"
        "order: the losses agree to rounding, and training amplifies rounding."
    )

    console.rule("[bold]What a step keeps for its backward pass")
    console.print(totals_table(kept))
    for kind, analysis in kept.items():
        console.print(rows_table(f"{kind}: the largest", analysis.rows[:8]))

    console.rule("[bold]Memory and time, each in a process of its own")
    with console.status("") as status:
        measurement = bt.measure(
            "examples.demo:build",
            batch_size=BATCH_SIZE,
            rounds=1 if options.quick else 3,
            progress=status.update,
        )
    console.print(measurement)

    plot(losses, kept, measurement, options.output)
    console.print(f"Plot: {options.output}")


def loss_table(losses, accuracies):
    table = Table()
    for column in ("", "stock", "compressed", "relative difference"):
        table.add_column(column, justify="right")
    for epoch, (stock, compressed) in enumerate(zip(*losses.values(), strict=True), start=1):
        difference = abs(stock - compressed) / stock
        table.add_row(
            f"loss, epoch {epoch}",
            f"{stock:.6f}",
            f"{compressed:.6f}",
            f"{difference:.1e}" if difference else "none",
        )
    table.add_section()
    table.add_row("test accuracy", *(f"{accuracy:.3f}" for accuracy in accuracies.values()), "")
    return table


def plot(losses, kept, measurement, path):
    """The losses, the bytes kept by kind, and the peaks, next to each other."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    loss_axes, kept_axes, peak_axes = figure.subplots(1, 3)

    for (kind, values), style in zip(losses.items(), ("-o", "--x"), strict=True):
        loss_axes.plot(range(1, len(values) + 1), values, style, label=kind)
    loss_axes.set(title="Loss", xlabel="epoch", ylim=(0, None))
    loss_axes.xaxis.get_major_locator().set_params(integer=True)
    loss_axes.legend()

    bottom = dict.fromkeys(kept, 0.0)
    for part in dict.fromkeys(part for analysis in kept.values() for part in analysis.totals):
        heights = [analysis.totals.get(part, 0) / 1e6 for analysis in kept.values()]
        kept_axes.bar(list(kept), heights, bottom=list(bottom.values()), label=part)
        bottom = {
            kind: low + height for (kind, low), height in zip(bottom.items(), heights, strict=True)
        }
    kept_axes.set(title=f"Kept for the backward pass (batch {BATCH_SIZE})", ylabel="MB")
    kept_axes.legend()

    peaks = [measurement.stock.above_resident / 1e6, measurement.compressed.above_resident / 1e6]
    bars = peak_axes.bar(["stock", "compressed"], peaks, color=["C0", "C1"])
    peak_axes.bar_label(bars, fmt="%.0f")
    peak_axes.set(title="Measured peak above the resident model", ylabel="MB")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
