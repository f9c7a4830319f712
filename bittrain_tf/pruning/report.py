"""What pruning has reached, layer by layer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from bittrain_tf.analysis.text import table, to_text
from bittrain_tf.layers import stock_class
from bittrain_tf.private import PART, flatten_layers
from bittrain_tf.pruning.state import FORWARD, Pruning

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class PrunedLayer:
    """One layer whose activations are pruned.

    Attributes:
        name: Its name.
        class_name: Its Keras class.
        mode: `"forward"` or `"saved"`.
        target_sparsity: The share of zeros aimed at.
        sparsity: The share of zeros reached, a running mean over the steps of training.
        thresholds: The smallest and the largest magnitude up to which the output is pruned;
            None in saved mode, where they are those of each step.
        steps: The steps of training taken.
    """

    name: str
    class_name: str
    mode: str
    target_sparsity: float
    sparsity: float
    thresholds: tuple[float, float] | None
    steps: int


@dataclasses.dataclass(frozen=True)
class PruningReport:
    """What pruning a model's activations has reached.

    Attributes:
        model: Name of the model.
        layers: The pruned layers, in the model's order; in saved mode those that have been
            found to keep something.
    """

    model: str
    layers: tuple[PrunedLayer, ...]

    def render(self) -> str:
        """The table, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return dataclasses.asdict(self)

    def __rich__(self) -> Table:
        """What rich prints."""
        numeric = ["target", "sparsity", "threshold", "steps"]
        return table(
            f"Pruned activations of {self.model}",
            ["layer", "mode", *numeric],
            (
                (
                    row.name,
                    row.mode,
                    f"{row.target_sparsity:.1%}",
                    f"{row.sparsity:.1%}",
                    _range_text(row.thresholds),
                    str(row.steps),
                )
                for row in self.layers
            ),
            numeric=numeric,
        )


def _range_text(thresholds: tuple[float, float] | None) -> str:
    if thresholds is None:
        return ""
    smallest, largest = thresholds
    return f"{largest:.3g}" if smallest == largest else f"{smallest:.3g} to {largest:.3g}"


def prunings(model: keras.Model) -> dict[keras.layers.Layer, Pruning]:
    """What is pruned of each layer of `model`, in the model's order."""
    found = {layer: vars(layer).get(PART) for layer in flatten_layers(model)}
    return {layer: pruning for layer, pruning in found.items() if pruning is not None}


def pruning_report(model: keras.Model) -> PruningReport:
    """What pruning the activations of `model` has reached."""
    rows = [_describe(layer, pruning) for layer, pruning in prunings(model).items()]
    if any(row.sparsity > 0 for row in rows):
        # Many layers keep nothing of their own: what they read is rebuilt from what others keep.
        rows = [row for row in rows if row.mode == FORWARD or row.sparsity > 0]
    return PruningReport(model.name, tuple(rows))


def _describe(layer: keras.layers.Layer, pruning: Pruning) -> PrunedLayer:
    thresholds = None
    if hasattr(pruning, "thresholds"):
        values = pruning.thresholds.numpy()
        thresholds = float(values.min()), float(values.max())
    built = pruning.built
    return PrunedLayer(
        layer.name,
        stock_class(layer).__name__,
        pruning.mode,
        pruning.target_sparsity,
        float(pruning.sparsity.numpy()) if built else 0.0,
        thresholds,
        int(pruning.step.numpy()) if built else 0,
    )
