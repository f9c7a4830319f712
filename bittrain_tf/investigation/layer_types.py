"""What is kept by the type of the layers whose activations it is."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import keras

from bittrain_tf.analysis import Analysis
from bittrain_tf.analysis.kept import INPUT
from bittrain_tf.analysis.scopes import LOSS
from bittrain_tf.analysis.text import size_text
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.probe import COMPRESSED, STOCK, Probe
from bittrain_tf.layers import stock_class
from bittrain_tf.private import flatten_layers

NO_LAYER = "(no layer)"


@dataclasses.dataclass(frozen=True)
class TypeMemory:
    """One type of layer.

    Attributes:
        layer_type: Its stock Keras class.
        stock: Bytes kept of the activations of such layers, in the stock model.
        compressed: The same, compressed.
    """

    layer_type: str
    stock: int
    compressed: int


@dataclasses.dataclass(frozen=True)
class KeptByType:
    """Activations kept by type of layer.

    Attributes:
        batch_size: Samples.
        rows: The types, the one that keeps most in the stock model first.
    """

    batch_size: int
    rows: tuple[TypeMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return dataclasses.asdict(self)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The table."""
        total = TypeMemory("total", *(sum(getattr(r, k) for r in self.rows) for k in _SIDES))
        rows = tuple(
            (row.layer_type, size_text(row.stock), size_text(row.compressed))
            for row in (*self.rows, total)
        )
        title = f"Activations kept by type of layer, batch {self.batch_size}"
        return (Grid(title, ("layer type", *_SIDES), rows, _SIDES),)


_SIDES = (STOCK, COMPRESSED)


def kept_by_type(probe: Probe, batch_size: int) -> KeptByType:
    """Bytes kept at a batch size, by the type of layer whose activations it is."""
    stock, compressed = (
        _by_type(probe.model, probe.analysis(kind, batch_size)) for kind in (STOCK, COMPRESSED)
    )
    rows = [
        TypeMemory(name, stock[name], compressed[name])
        for name in dict.fromkeys([*stock, *compressed])
    ]
    return KeptByType(
        batch_size, tuple(sorted(rows, key=lambda row: (-row.stock, -row.compressed)))
    )


def _by_type(model: keras.Model, analysis: Analysis) -> collections.Counter[str]:
    totals: collections.Counter[str] = collections.Counter()
    for row in analysis.rows:
        if row.kind != INPUT:
            totals[layer_type(model, row.source)] += row.bytes
    return totals


def layer_type(model: keras.Model, label: str) -> str:
    """The stock class of a layer.

    Args:
        model: The model.
        label: What an analysis calls the layer: its name, `"outer/inner"` if nested.

    Returns:
        The name of the class; of the first, should several layers have that name.
    """
    if not label:
        return NO_LAYER
    if label == LOSS:
        return label
    found = [model]
    for name in label.split("/"):
        inside = [x for outer in found for x in flatten_layers(outer) if x.name == name]
        # Operations of the model itself carry its own name.
        found = inside or [x for x in found if x.name == name]
    return stock_class(found[0]).__name__ if found else NO_LAYER
