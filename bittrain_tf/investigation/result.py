"""The result of `investigate`."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from bittrain_tf.analysis.text import to_text
from bittrain_tf.investigation.formats import Formats
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.layer_types import KeptByType
from bittrain_tf.investigation.memory import Memory
from bittrain_tf.investigation.sparsity import Sparsity
from bittrain_tf.investigation.trained_parts import TrainedParts

if TYPE_CHECKING:
    from rich.console import Group

_ROWS_SHOWN = 16
RANDOM_DATA = (
    "The data are random images. Sparsity over random images is not representative of real ones, "
    "nor is what depends on it: bytes compressed and in formats of sparse tensors. Give data of "
    "your own with --data FILE.npz."
)


@dataclasses.dataclass(frozen=True)
class Investigation:
    """Where the memory of training a model goes.

    Attributes:
        model: Name of the model.
        samples: Samples of the data.
        random_data: Whether these are random numbers.
        memory: Memory by batch size; None, as the other parts, if it could not be had.
        kept_by_type: Activations kept by type of layer.
        sparsity: Zeros in activations over training.
        formats: Activations in each format of sparse tensors.
        trained_parts: Memory by what is trained.
        failures: Why a part could not be had, by the attribute that is None.
    """

    model: str
    samples: int
    random_data: bool
    memory: Memory | None
    kept_by_type: KeptByType | None
    sparsity: Sparsity | None
    formats: Formats | None
    trained_parts: TrainedParts | None
    failures: dict[str, str]

    def part(self, name: str) -> Any:
        """One of `PARTS`; None if it could not be had."""
        return getattr(self, name)

    def render(self) -> str:
        """The tables, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        parts = {name: self.part(name) for name in PARTS}
        return {
            "model": self.model,
            "samples": self.samples,
            "random_data": self.random_data,
            **{name: part and part.to_dict() for name, part in parts.items()},
            "failures": self.failures,
        }

    def save(self, directory: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Draw the figures and write a page with them, `index.html`, which needs no other file.

        Args:
            directory: The folder to write into; made if it does not exist.
            overwrite: Whether files of these names may be replaced.

        Raises:
            ImportError: If matplotlib is not installed.
            FileExistsError: If such a file exists and `overwrite` is False.
        """
        from bittrain_tf.investigation.page import save

        save(self, directory, overwrite=overwrite)

    def __rich__(self) -> Group:
        """What rich prints."""
        from rich.console import Group
        from rich.text import Text

        shown: list[Any] = [Text(RANDOM_DATA + "\n")] if self.random_data else []
        for name in PARTS:
            part = self.part(name)
            if part is None:
                shown.append(Text(f"{PARTS[name]}: not available. {self.failures[name]}\n"))
            else:
                shown += [_shortened(grid) for grid in part.grids]
        return Group(*shown)


PARTS = {
    "memory": "Memory of a training step by batch size",
    "kept_by_type": "Activations kept by type of layer",
    "sparsity": "Sparsity over training",
    "formats": "Formats of sparse tensors",
    "trained_parts": "Memory by what is trained",
}


def _shortened(grid: Grid) -> Grid:
    left = len(grid.rows) - _ROWS_SHOWN
    if left <= 0:
        return grid
    more = (f"({left} more)", *("" for _ in grid.columns[1:]))
    return dataclasses.replace(grid, rows=(*grid.rows[:_ROWS_SHOWN], more))
