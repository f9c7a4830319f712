"""How much of what is kept is zero, layer by layer, while the model is trained."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf.analysis.audit import StepAudit
from bittrain_tf.analysis.kept import DENSE
from bittrain_tf.analysis.scopes import LOSS
from bittrain_tf.investigation.grid import Grid, share_text
from bittrain_tf.investigation.layer_types import NO_LAYER, layer_type
from bittrain_tf.investigation.probe import Probe
from bittrain_tf.investigation.unchanged import train_with_copies, unchanged


@dataclasses.dataclass(frozen=True)
class LayerSparsity:
    """One layer.

    Attributes:
        layer: Its name, `"outer/inner"` if nested.
        layer_type: Its stock Keras class.
        elements: Elements of the tensors that are kept of what it made.
        zeros: The share of them that is zero, before training and after each epoch.
    """

    layer: str
    layer_type: str
    elements: int
    zeros: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Zeros in what the stock model keeps, over training.

    Attributes:
        batch_size: Samples of the batch that is probed, and of a training step.
        losses: The training loss of each epoch; None if it is not a finite number, or not told.
        layers: The layers, in the order of the forward pass.
    """

    batch_size: int
    losses: tuple[float | None, ...]
    layers: tuple[LayerSparsity, ...]

    @property
    def by_type(self) -> dict[str, tuple[float, ...]]:
        """The shares by type of layer, each layer weighted by its elements."""
        of_type: dict[str, list[LayerSparsity]] = collections.defaultdict(list)
        for layer in self.layers:
            of_type[layer.layer_type].append(layer)
        return {name: _weighted(layers) for name, layers in of_type.items()}

    @property
    def overall(self) -> tuple[float, ...]:
        """The shares of all layers together."""
        return _weighted(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {**dataclasses.asdict(self), "by_type": self.by_type, "overall": self.overall}

    @property
    def grids(self) -> tuple[Grid, ...]:
        """By type, and by layer."""
        times = probe_names(len(self.losses))
        types = [(name, *map(share_text, zeros)) for name, zeros in self.by_type.items()]
        types.append(("all", *map(share_text, self.overall)))
        if self.losses:
            types.append(("(training loss)", "-", *(_loss_text(v) for v in self.losses)))
        layers = (
            (layer.layer, layer.layer_type, str(layer.elements), *map(share_text, layer.zeros))
            for layer in self.layers
        )
        return (
            Grid("Share of zeros by type of layer", ("layer type", *times), tuple(types), times),
            Grid(
                "Share of zeros by layer",
                ("layer", "type", "elements", *times),
                tuple(layers),
                ("elements", *times),
            ),
        )


def probe_names(epochs: int) -> tuple[str, ...]:
    """When the batch was probed, in words."""
    return ("untrained", *(f"epoch {i + 1}" for i in range(epochs)))


def sparsity_over_training(probe: Probe, batch_size: int, epochs: int) -> Sparsity:
    """Train a model, probing one batch before and after each epoch; then undo the training.

    Args:
        probe: The model and the data.
        batch_size: Samples of the batch that is probed, and of a training step.
        epochs: Epochs of training, on all of the data.

    Raises:
        ValueError: If no tensor worth counting is kept.
    """
    with probe.stock():
        audit = StepAudit(probe.model, *probe.batch(batch_size))
    probes = [_zeros(audit)]
    losses: list[float | None] = []

    def probe_epoch(epoch: int, logs: Mapping[str, Any] | None) -> None:
        loss = (logs or {}).get("loss")
        losses.append(float(loss) if loss is not None and math.isfinite(loss) else None)
        probes.append(_zeros(audit))

    if epochs:
        with unchanged(probe.model), probe.stock():
            train_with_copies(probe.model)
            probe.model.fit(
                probe.x,
                probe.y,
                batch_size=batch_size,
                epochs=epochs,
                verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=probe_epoch)],
            )
    layers = tuple(
        LayerSparsity(
            label or NO_LAYER,
            layer_type(probe.model, label),
            elements,
            tuple(zeros[label][0] / zeros[label][1] for zeros in probes),
        )
        for label, (_, elements) in probes[0].items()
        if all(label in zeros for zeros in probes)
    )
    if not layers:
        raise ValueError(
            "The stock model keeps no activation of 1 KB or more for its backward pass."
        )
    return Sparsity(batch_size, tuple(losses), layers)


def _zeros(audit: StepAudit) -> dict[str, tuple[int, int]]:
    """Zeros and elements of the floating-point tensors kept, by layer."""
    found: dict[str, tuple[int, int]] = {}
    for row in audit.rows():
        dtype = tf.as_dtype(row.dtype)
        if row.kind != DENSE or row.layer == LOSS or not dtype.is_floating or row.density is None:
            continue
        size = row.bytes // dtype.size
        zeros, elements = found.get(row.layer, (0, 0))
        found[row.layer] = zeros + round((1 - row.density) * size), elements + size
    return found


def _weighted(layers: list[LayerSparsity] | tuple[LayerSparsity, ...]) -> tuple[float, ...]:
    elements = sum(layer.elements for layer in layers)
    columns = zip(*(layer.zeros for layer in layers), strict=True)
    return tuple(
        sum(share * layer.elements for share, layer in zip(shares, layers, strict=True)) / elements
        for shares in columns
    )


def _loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"
