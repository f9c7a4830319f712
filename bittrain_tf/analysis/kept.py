"""The result of `analyze`: what a training step keeps for its backward pass."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from bittrain_tf.analysis.plots import save_bars
from bittrain_tf.analysis.text import size_text, table, to_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

DENSE, MASK, SMALL, INPUT = "dense", "mask", "small", "input"
_ROWS_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who keeps a tensor.

    Attributes:
        layer: The layer whose backward pass reads it; empty if it is none's.
        op: The type of the operation that reads it (`decode_...` for a decoder).
    """

    layer: str
    op: str

    def __str__(self) -> str:
        """`layer: op`."""
        return f"{self.layer}: {self.op}" if self.layer else self.op


@dataclasses.dataclass(frozen=True)
class KeptTensor:
    """One tensor kept from the forward to the backward pass.

    Attributes:
        layer: The layer that made it, `"outer/inner"` if nested; empty if none did.
        tensor: Its name in the traced graph.
        shape: Its shape; None for a length that is not known even after the run.
        dtype: Its dtype, by name; for a loop's list of tensors, the dtype of these.
        bytes: Its size in bytes.
        density: Share of its elements that are not all zero bits; None if it has none.
        kind: `"dense"`; `"mask"` (one bit an element); the name of the codec it is a
            part of (`"bitmap"`); `"small"` (under 1 KB, or a statistic of the batch);
            or `"input"` (the caller's data, which is there in any case).
        holders: Who keeps it.
        source: The layer whose activation it is. That is `layer`, but for an encoding,
            which is made where the activation is first read.
    """

    layer: str
    tensor: str
    shape: tuple[int | None, ...]
    dtype: str
    bytes: int
    density: float | None
    kind: str
    holders: tuple[Holder, ...]
    source: str

    @property
    def break_even(self) -> float:
        """The density below which the bitmap codec keeps it in fewer bytes than dense."""
        return 1 - 1 / (8 * tf.as_dtype(self.dtype).size)


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What one training step of a model keeps for its backward pass.

    Attributes:
        model: Name of the model.
        rows: The tensors kept, the largest first.
    """

    model: str
    rows: tuple[KeptTensor, ...]

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by kind, the largest first; `"input"` is not kept for us and left out."""
        totals: dict[str, int] = {}
        for row in self.rows:
            if row.kind != INPUT:
                totals[row.kind] = totals.get(row.kind, 0) + row.bytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def kept_bytes(self) -> int:
        """Bytes of all activations kept, in whatever form."""
        return sum(self.totals.values())

    def sparse_dense(
        self, threshold_bytes: int = 65536, min_saving: float = 0.05
    ) -> tuple[KeptTensor, ...]:
        """What is kept dense though the bitmap codec would make it smaller.

        Args:
            threshold_bytes: Tensors of fewer bytes are left out.
            min_saving: So are those of which the codec would save a smaller share than
                this: a few zeros are not worth encoding. 0 for all below the break-even.
        """
        return tuple(
            row
            for row in self.rows
            if row.kind == DENSE
            and row.bytes >= threshold_bytes
            and row.density is not None
            and row.density < row.break_even
            and row.break_even - row.density >= min_saving
        )

    def render(self) -> str:
        """The totals and the largest tensors, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "model": self.model,
            "kept_bytes": self.kept_bytes,
            "totals": self.totals,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def plot(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Save a bar chart of the bytes kept, by layer and kind (the largest layers).

        Args:
            path: The file to write, ending in `.png`, `.svg` or `.pdf`.
            overwrite: Whether an existing file may be replaced.

        Raises:
            ImportError: If matplotlib is not installed.
            FileExistsError: If the file exists and `overwrite` is False.
            ValueError: If the ending is of no known format.
        """
        by_layer: dict[str, dict[str, int]] = {}
        for row in self.rows:
            if row.kind != INPUT:
                of_layer = by_layer.setdefault(row.layer, {})
                of_layer[row.kind] = of_layer.get(row.kind, 0) + row.bytes
        layers = sorted(by_layer, key=lambda name: -sum(by_layer[name].values()))[:_ROWS_SHOWN]
        save_bars(
            path,
            f"Kept for the backward pass of {self.model}: {size_text(self.kept_bytes)}",
            "MB",
            layers,
            {kind: [by_layer[name].get(kind, 0) / 1e6 for name in layers] for kind in self.totals},
            stacked=True,
            overwrite=overwrite,
        )

    def __rich__(self) -> Group:
        """What rich prints."""
        from rich.console import Group

        shown = rows_table(f"Largest of {len(self.rows)} tensors", self.rows[:_ROWS_SHOWN])
        return Group(totals_table({self.model: self}), shown)


def totals_table(analyses: dict[str, Analysis]) -> Table:
    """Bytes kept by kind, a column each of `analyses`, by heading."""
    kinds = list(dict.fromkeys(kind for a in analyses.values() for kind in a.totals))
    rows = [
        (kind, *(size_text(a.totals.get(kind, 0)) for a in analyses.values())) for kind in kinds
    ]
    rows.append(("total", *(size_text(a.kept_bytes) for a in analyses.values())))
    headings = list(analyses)
    return table("Kept for the backward pass", ["kind", *headings], rows, numeric=headings)


def rows_table(title: str, rows: tuple[KeptTensor, ...]) -> Table:
    """A line for each of `rows`."""
    return table(
        title,
        ["layer", "kind", "shape", "dtype", "size", "density", "held by"],
        (
            (
                row.layer or row.tensor,
                row.kind,
                "x".join("?" if d is None else str(d) for d in row.shape),
                row.dtype,
                size_text(row.bytes),
                "-" if row.density is None else f"{row.density:.3f}",
                ", ".join(map(str, row.holders)),
            )
            for row in rows
        ),
        numeric=["size", "density"],
    )
