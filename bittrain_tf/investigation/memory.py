"""What a training step takes: parameters, gradients, optimizer, activations, by batch size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf.analysis.text import size_text
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.probe import KINDS, Probe
from bittrain_tf.investigation.unchanged import copy_of


@dataclasses.dataclass(frozen=True)
class BatchMemory:
    """One batch size, stock or compressed; all in bytes.

    Attributes:
        batch_size: Samples.
        kind: `"stock"` or `"compressed"`.
        parameters: The weights, whether they are trained or not.
        gradients: Those of the weights that are trained.
        optimizer: The optimizer's variables.
        activations: What is kept for the backward pass.
    """

    batch_size: int
    kind: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of the four."""
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a training step by batch size.

    Attributes:
        rows: For each batch size stock and compressed.
    """

    rows: tuple[BatchMemory, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {"rows": [{**dataclasses.asdict(row), "total": row.total} for row in self.rows]}

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The table."""
        numeric = ("batch", "parameters", "gradients", "optimizer", "activations", "total")
        rows = (
            (
                str(row.batch_size),
                row.kind,
                size_text(row.parameters),
                size_text(row.gradients),
                size_text(row.optimizer),
                size_text(row.activations),
                size_text(row.total),
            )
            for row in self.rows
        )
        columns = (numeric[0], "layers", *numeric[1:])
        return (Grid("Memory of a training step", columns, tuple(rows), numeric),)


def memory_by_batch(probe: Probe, batch_sizes: Sequence[int]) -> Memory:
    """Memory of a training step at each of `batch_sizes`, stock and compressed."""
    model = probe.model
    parameters, gradients = nbytes(model.weights), nbytes(model.trainable_weights)
    optimizer = optimizer_bytes(model)
    return Memory(
        tuple(
            BatchMemory(
                size, kind, parameters, gradients, optimizer, probe.analysis(kind, size).kept_bytes
            )
            for size in batch_sizes
            for kind in KINDS
        )
    )


def optimizer_bytes(model: keras.Model) -> int:
    """Bytes of the optimizer's variables for what is trainable now; built as a copy."""
    optimizer = copy_of(model.optimizer)
    optimizer.build(model.trainable_variables)
    return nbytes(optimizer.variables)


def nbytes(variables: Iterable[keras.Variable]) -> int:
    """Bytes of variables."""
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
