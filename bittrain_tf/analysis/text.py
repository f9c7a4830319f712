"""Text of figures and tables. Rich is imported only when a table is made."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 120  # columns of text that is not for a terminal


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()
) -> Table:
    """A table for the terminal.

    Args:
        title: Its title.
        columns: Its headings.
        rows: As many texts as there are headings, each.
        numeric: The headings of the columns to align right.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title) + 1)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numeric else "left",
            overflow="fold",
            no_wrap=column != columns[-1],  # where there is little room, the last gives way
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))  # names may look like rich markup
    return made


def to_text(*renderables: Any) -> str:
    """What rich prints for `renderables`, without colours."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=WIDTH).print(*renderables, sep="\n")
    return out.getvalue()


def size_text(size: int) -> str:
    """`size` bytes in B, KB or MB (powers of 1000)."""
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} KB"
