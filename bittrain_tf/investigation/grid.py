"""A table that the terminal and the page both show."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from bittrain_tf.analysis.text import table

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Grid:
    """Texts in rows and columns.

    Attributes:
        title: What it shows.
        columns: The headings.
        rows: As many texts as there are headings, each.
        numeric: The headings of columns to align right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[str, ...] = ()

    def __rich__(self) -> Table:
        """What rich prints."""
        return table(self.title, self.columns, self.rows, self.numeric)


def share_text(share: float | None) -> str:
    """A share such as 0.513, or a dash if there is none."""
    return "-" if share is None else f"{share:.3f}"
