"""Fine-tuning a backbone three ways, and what each keeps for its backward pass.

As in the BitTrain paper (arXiv 2110.15362): everything is trained, or the head only,
or the biases only.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from rich.console import Console
from rich.table import Table

import bittrain_tf as bt
from examples.digits import load


def build(trained):
    keras.utils.set_random_seed(0)
    backbone = keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, include_top=False, pooling="avg"
    )
    model = keras.Sequential([backbone, keras.layers.Dense(10, activation="softmax", name="head")])
    if trained == "head":
        backbone.trainable = False
    elif trained == "biases":
        for variable in backbone.variables:
            # MobileNetV2's biases are the offsets of its batch normalizations.
            variable.trainable = variable.trainable and variable.name in ("bias", "beta")
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    return model


def main():
    (x, y), _ = load(channels=3)
    table = Table(title="MobileNetV2, batches of 64: kept for the backward pass")
    for column in ("trained", "parameters", "stock", "compressed"):
        table.add_column(column, justify="right")
    for trained in ("everything", "head", "biases"):
        model = build(trained)
        stock = bt.analyze(model, x[:64], y[:64]).kept_bytes
        bt.compress(model)
        compressed = bt.analyze(model, x[:64], y[:64]).kept_bytes
        table.add_row(
            trained,
            f"{sum(v.shape.num_elements() for v in model.trainable_variables):,}",
            f"{stock / 1e6:.1f} MB",
            f"{compressed / 1e6:.1f} MB",
        )
        if trained == "head":
            losses = model.fit(x, y, batch_size=64, epochs=3, verbose=0).history["loss"]
    Console(width=100).print(table)
    print("head only, compressed:", *(f"loss {loss:.3f}" for loss in losses))


if __name__ == "__main__":
    main()
