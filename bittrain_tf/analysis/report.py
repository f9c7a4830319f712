"""`report`: which layers of a model are compressed, and why the others are not."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import keras

from bittrain_tf.analysis.text import table, to_text
from bittrain_tf.layers import CompressedLayer, Rerun, skip_reason, stock_class
from bittrain_tf.private import flatten_layers
from bittrain_tf.rewrite import check_model

if TYPE_CHECKING:
    from rich.table import Table

COMPRESSED, STOCK = "compressed", "stock"
_CONTAINERS = (keras.Model, keras.layers.Bidirectional, keras.layers.Wrapper)


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name: Its name.
        class_name: Its Keras class.
        status: `"compressed"` or `"stock"`.
        codec: The name of its codec; None for a stock layer, or one that is re-run.
        choice: Whether its output is kept or rebuilt where a plan has chosen; else None.
        reason: Why it is stock, or how it is compressed where that is not its own form.
    """

    name: str
    class_name: str
    status: str
    codec: str | None
    choice: str | None
    reason: str | None


@dataclasses.dataclass(frozen=True)
class Report:
    """Which layers of a model are compressed.

    Attributes:
        model: Name of the model.
        layers: A row for each layer at any depth, in the model's order.
    """

    model: str
    layers: tuple[LayerReport, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many layers are compressed and how many stock."""
        found = collections.Counter(layer.status for layer in self.layers)
        return {status: found[status] for status in (COMPRESSED, STOCK)}

    def render(self) -> str:
        """The table, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "model": self.model,
            "counts": self.counts,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def __rich__(self) -> Table:
        """What rich prints."""
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return table(
            f"Layers of {self.model}: {counts}",
            ["layer", "class", "status", "codec", "output", "reason"],
            (
                (
                    row.name,
                    row.class_name,
                    row.status,
                    row.codec or "",
                    row.choice or "",
                    row.reason or "",
                )
                for row in self.layers
            ),
        )


def report(model: keras.Model) -> Report:
    """Which layers of `model` are compressed, and why each of the others is not.

    Args:
        model: A built Keras model, compressed or not.

    Returns:
        A row for each layer; see `Report`.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built.
    """
    check_model(model)
    layers = flatten_layers(model)
    any_compressed = any(isinstance(layer, CompressedLayer) for layer in layers)
    rerun = [layer for layer in layers if isinstance(layer, Rerun)]
    parts = {part: layer.name for layer in rerun for part in flatten_layers(layer)}
    rows = (_describe(layer, any_compressed, parts.get(layer)) for layer in layers)
    return Report(model.name, tuple(rows))


def _describe(layer: keras.layers.Layer, any_compressed: bool, part_of: str | None) -> LayerReport:
    class_name = stock_class(layer).__name__
    if isinstance(layer, Rerun):
        return LayerReport(layer.name, class_name, COMPRESSED, None, None, "re-run as a whole")
    if isinstance(layer, CompressedLayer):
        return LayerReport(layer.name, class_name, COMPRESSED, layer.codec.name, layer.choice, None)
    if part_of is not None:
        reason = f"re-run as part of {part_of}"
    elif isinstance(layer, _CONTAINERS):
        reason = "container"
    else:
        reason = skip_reason(layer) or (
            "left out by filters" if any_compressed else "not compressed"
        )
    return LayerReport(layer.name, class_name, STOCK, None, None, reason)
