"""The figures of an investigation: what each is of, and how it is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bittrain_tf.analysis import plots
from bittrain_tf.investigation.formats import DENSE, ENCODERS, Formats
from bittrain_tf.investigation.layer_types import KeptByType
from bittrain_tf.investigation.memory import Memory
from bittrain_tf.investigation.result import Investigation
from bittrain_tf.investigation.sparsity import Sparsity, probe_names
from bittrain_tf.investigation.trained_parts import TrainedParts

_BYTES = ("parameters", "gradients", "optimizer", "activations")
_VISIBLE = 0.005  # of the longest bar
_HAS_ZEROS = 0.1  # layers with fewer zeros at all times have nothing to show


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        part: The part of the investigation it is of.
        file: Name of its file.
        caption: What it shows and how it was got.
        draw: Draws `(investigation, path)`, replacing what is there; returns False if there is
            nothing to draw.
    """

    part: str
    file: str
    caption: str
    draw: Callable[[Investigation, str], bool]


def _memory(found: Investigation, path: str) -> bool:
    part: Memory = found.memory
    factor, unit = _unit(max(row.total for row in part.rows))
    plots.save_bars(
        path,
        f"{found.model}: memory of a training step by batch size",
        unit,
        [f"batch {row.batch_size}, {row.kind}" for row in part.rows],
        {name: [getattr(row, name) / factor for row in part.rows] for name in _BYTES},
        stacked=True,
        overwrite=True,
    )
    return True


def _kept_by_type(found: Investigation, path: str) -> bool:
    part: KeptByType = found.kept_by_type
    most = max((max(row.stock, row.compressed) for row in part.rows), default=0)
    rows = [row for row in part.rows if max(row.stock, row.compressed) > _VISIBLE * most]
    if not rows:
        return False
    factor, unit = _unit(most)
    plots.save_bars(
        path,
        f"{found.model}: activations kept by type of layer, batch {part.batch_size}",
        unit,
        [row.layer_type for row in rows],
        {
            "stock": [row.stock / factor for row in rows],
            "compressed": [row.compressed / factor for row in rows],
        },
        overwrite=True,
    )
    return True


def _sparsity_by_layer(found: Investigation, path: str) -> bool:
    part: Sparsity = found.sparsity
    shown = [layer for layer in part.layers if max(layer.zeros) >= _HAS_ZEROS]
    if not shown:
        return False
    times = probe_names(len(part.losses))
    plots.save_lines(
        path,
        f"{found.model}: zeros in what layers keep, from input to output",
        ("", "share of zeros"),
        [layer.layer for layer in shown],
        {time: [layer.zeros[i] for layer in shown] for i, time in enumerate(times)},
        in_order=True,
        overwrite=True,
    )
    return True


def _sparsity_by_type(found: Investigation, path: str) -> bool:
    part: Sparsity = found.sparsity
    plots.save_lines(
        path,
        f"{found.model}: zeros in what layers keep, by type of layer",
        ("", "share of zeros"),
        probe_names(len(part.losses)),
        {**part.by_type, "all": part.overall},
        overwrite=True,
    )
    return True


def _formats(found: Investigation, path: str) -> bool:
    part: Formats = found.formats
    plots.save_ratios(
        path,
        f"{found.model}: bytes of each activation kept, by format",
        ("density (share of non-zeros)", "bytes as a ratio to dense"),
        {
            name: [(t.density, t.nbytes[name] / t.nbytes[DENSE]) for t in part.tensors]
            for name in ENCODERS
            if name != DENSE
        },
        overwrite=True,
    )
    return True


def _formats_total(found: Investigation, path: str) -> bool:
    part: Formats = found.formats
    factor, unit = _unit(max(total.nbytes for total in part.totals))
    plots.save_bars(
        path,
        f"{found.model}: activations kept, by format, batch {part.batch_size}",
        unit,
        [total.format for total in part.totals],
        {
            "all in this format": [total.nbytes / factor for total in part.totals],
            "in this format where smaller, else dense": [
                total.or_dense / factor for total in part.totals
            ],
        },
        overwrite=True,
    )
    return True


def _trained_parts(found: Investigation, path: str) -> bool:
    part: TrainedParts = found.trained_parts
    bars = [(row, kind) for row in part.rows for kind in ("stock", "compressed")]
    factor, unit = _unit(max(row.parameters + row.stock for row in part.rows))
    plots.save_bars(
        path,
        f"{found.model}: memory by what is trained, batch {part.batch_size}",
        unit,
        [f"{row.trained}, {kind}" for row, kind in bars],
        {
            **{name: [getattr(row, name) / factor for row, _ in bars] for name in _BYTES[:3]},
            "activations": [getattr(row, kind) / factor for row, kind in bars],
        },
        stacked=True,
        overwrite=True,
    )
    return True


def _unit(most: int) -> tuple[float, str]:
    return (1e6, "MB") if most >= 1e6 else (1e3, "KB")


FIGURES = tuple(
    Figure(*figure)
    for figure in (
        (
            "memory",
            "memory.png",
            "Parameters, gradients and optimizer do not grow with the batch, activations do: sizes "
            "of the variables, and of the tensors that the traced training step hands from its "
            "forward to its backward pass.",
            _memory,
        ),
        (
            "kept_by_type",
            "kept_by_type.png",
            "Whose activations are kept: each tensor that the traced step keeps for its backward "
            "pass, counted for the type of the layer whose output it is, or is an encoding of.",
            _kept_by_type,
        ),
        (
            "sparsity",
            "sparsity_by_layer.png",
            "Zeros in the tensors that the stock model keeps, counted on one batch before training "
            "and after each epoch; layers with under 10 % of zeros at all times are left to the "
            "table.",
            _sparsity_by_layer,
        ),
        (
            "sparsity",
            "sparsity_by_type.png",
            "The same by type of layer, over training, each layer weighted by the elements it "
            "keeps.",
            _sparsity_by_type,
        ),
        (
            "formats",
            "formats.png",
            "Every point is one tensor that the stock model keeps, really encoded: below the line "
            "at 1 the format takes fewer bytes than the dense tensor. The weights are those the "
            "model came with.",
            _formats,
        ),
        (
            "formats",
            "formats_total.png",
            "The sums over these tensors: all in the one format, and with those left dense that "
            "the format would make larger.",
            _formats_total,
        ),
        (
            "trained_parts",
            "trained_parts.png",
            "Training the head, the last layer with weights, or the biases alone takes fewer "
            "gradients and less optimizer state; activations are those of the step traced with "
            "only these weights trainable.",
            _trained_parts,
        ),
    )
)
