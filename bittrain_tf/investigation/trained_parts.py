"""Training everything, the head only, the biases only: what each takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from bittrain_tf.analysis.text import size_text
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.memory import nbytes, optimizer_bytes
from bittrain_tf.investigation.probe import COMPRESSED, STOCK, Probe
from bittrain_tf.investigation.unchanged import unchanged
from bittrain_tf.private import flatten_layers

EVERYTHING, HEAD, BIASES = "everything", "head only", "biases only"
_BIAS_NAMES = ("bias", "beta")  # beta: the offset of a normalization


@dataclasses.dataclass(frozen=True)
class TrainedPart:
    """Training some of the weights; all in bytes.

    Attributes:
        trained: `"everything"`, `"head only"` or `"biases only"`.
        parameters: The weights, whether they are trained or not.
        gradients: Those of the weights that are trained, and as large as these.
        optimizer: The optimizer's variables.
        stock: Activations kept by the stock model.
        compressed: Activations kept by the compressed one.
    """

    trained: str
    parameters: int
    gradients: int
    optimizer: int
    stock: int
    compressed: int


@dataclasses.dataclass(frozen=True)
class TrainedParts:
    """What training takes by what is trained.

    Attributes:
        batch_size: Samples.
        head: The layer that is trained of "head only".
        rows: Everything, the head, and the biases if there are any.
    """

    batch_size: int
    head: str
    rows: tuple[TrainedPart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return dataclasses.asdict(self)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The table."""
        numeric = (
            "parameters",
            "gradients",
            "optimizer",
            "activations, stock",
            "compressed",
        )
        rows = tuple(
            (
                row.trained,
                *map(
                    size_text,
                    (row.parameters, row.gradients, row.optimizer, row.stock, row.compressed),
                ),
            )
            for row in self.rows
        )
        title = f"By what is trained, batch {self.batch_size} (the head is {self.head})"
        return (Grid(title, ("trained", *numeric), rows, numeric),)


def trained_parts(probe: Probe, batch_size: int) -> TrainedParts:
    """What training everything, the head and the biases takes, at a batch size.

    Raises:
        ValueError: If the model has no weights to train.
    """
    model = probe.model
    with unchanged(model):
        _unfreeze(model)
        if not model.trainable_variables:
            raise ValueError(f"Model {model.name!r} has no weights that could be trained.")
        head = _head(model)
    rows = []
    for name in (EVERYTHING, HEAD, BIASES):
        with unchanged(model):
            _choose(model, name, head)
            if model.trainable_variables:  # not every model has biases
                rows.append(_part(name, probe, batch_size))
    return TrainedParts(batch_size, head.name, tuple(rows))


def _part(name: str, probe: Probe, batch_size: int) -> TrainedPart:
    return TrainedPart(
        name,
        nbytes(probe.model.weights),
        nbytes(probe.model.trainable_weights),
        optimizer_bytes(probe.model),
        *(probe.analysis(kind, batch_size).kept_bytes for kind in (STOCK, COMPRESSED)),
    )


def _choose(model: keras.Model, name: str, head: keras.layers.Layer) -> None:
    """Make the weights of a part trainable, and no others."""
    _unfreeze(model)
    of_head = {id(v) for v in head.variables}
    for variable in model.trainable_variables:
        if name == HEAD:
            variable.trainable = id(variable) in of_head
        elif name == BIASES:
            variable.trainable = variable.name in _BIAS_NAMES


def _unfreeze(model: keras.Model) -> None:
    """Make trainable whatever was made to be trained."""
    for layer in (model, *flatten_layers(model)):
        # A flag that has the value already is not passed on to weights and the layers inside.
        layer.trainable = False
        layer.trainable = True


def _head(model: keras.Model) -> keras.layers.Layer:
    """The last layer with weights that can be trained; in a model inside, if that is last."""
    head: keras.layers.Layer = model
    while isinstance(head, keras.Model):
        inside = [layer for layer in head.layers if layer.trainable_variables]
        if not inside:
            break
        head = inside[-1]
    return head
