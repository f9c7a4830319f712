"""The page of an investigation: `index.html`, which needs no other file, and the figures."""

from __future__ import annotations

import base64
import html
import os
import pathlib

import keras
import tensorflow as tf

from bittrain_tf.analysis import plots
from bittrain_tf.investigation.figures import FIGURES
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.result import PARTS, RANDOM_DATA, Investigation

_PAGE = "index.html"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; }
figcaption, .made { color: #555; font-size: 0.9rem; }
.scroll { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.4rem; }
th, td { padding: 0.2rem 0.8rem; border-bottom: 1px solid #ddd; text-align: left; }
th.number, td.number { text-align: right; white-space: nowrap; }
.note { background: #fff6e0; border-left: 4px solid #e0a000; padding: 0.6rem 1rem; }
summary { cursor: pointer; }
"""
_LONG = 20  # rows; a longer table is folded


def check_directory(directory: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise now what `save` would raise after the work is done.

    Raises:
        ImportError: If matplotlib is not installed.
        FileExistsError: If a file to be written exists and `overwrite` is False, or there
            is a file where the folder is to be.
    """
    folder = pathlib.Path(directory)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{os.fspath(directory)} is a file; name a folder to write into.")
    for name in (*(figure.file for figure in FIGURES), _PAGE):
        if (folder / name).exists() and not overwrite:
            raise FileExistsError(
                f"{folder / name} exists already; choose another folder or pass overwrite=True."
            )
    plots.check_path(folder / FIGURES[0].file, overwrite=True)  # is matplotlib there?


def save(
    found: Investigation, directory: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """See `Investigation.save`."""
    check_directory(directory, overwrite=overwrite)
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        path = folder / figure.file
        path.unlink(missing_ok=True)  # where there is nothing to draw now, none of before is left
        if found.part(figure.part) is not None:
            figure.draw(found, os.fspath(path))
    (folder / _PAGE).write_text(_page(found, folder), encoding="utf-8")


def _page(found: Investigation, folder: pathlib.Path) -> str:
    import bittrain_tf

    title = html.escape(f"Where the memory of training {found.model} goes")
    made = (
        "Stock is the Keras model, compressed the same after bittrain_tf.compress(model). Nothing "
        "is estimated: sizes are those of real variables and of tensors of the traced step, run "
        f"forward once. {found.samples} samples. bittrain-tf {bittrain_tf.__version__}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}."
    )
    sections = [_section(found, part, heading, folder) for part, heading in PARTS.items()]
    note = f'<p class="note">{html.escape(RANDOM_DATA)}</p>' if found.random_data else ""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f'<p class="made">{html.escape(made)}</p>',
            note,
            *sections,
            "</body></html>\n",
        ]
    )


def _section(found: Investigation, part: str, heading: str, folder: pathlib.Path) -> str:
    pieces = [f"<h2>{html.escape(heading)}</h2>"]
    if found.part(part) is None:
        pieces.append(f'<p class="note">Not available. {html.escape(found.failures[part])}</p>')
        return "\n".join(pieces)
    for figure in FIGURES:
        path = folder / figure.file
        if figure.part == part and path.exists():
            image = base64.b64encode(path.read_bytes()).decode("ascii")
            caption = html.escape(figure.caption)
            pieces.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{image}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    pieces += [_table(grid) for grid in found.part(part).grids]
    return "\n".join(pieces)


def _table(grid: Grid) -> str:
    def row(tag: str, cells: tuple[str, ...]) -> str:
        made = (
            f"<{tag}{_class(grid, column)}>{html.escape(cell)}</{tag}>"
            for column, cell in zip(grid.columns, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    title = html.escape(grid.title)
    is_long = len(grid.rows) > _LONG
    caption = "" if is_long else f"<caption>{title}</caption>"
    made = (
        f'<div class="scroll"><table>{caption}<thead>{row("th", grid.columns)}</thead>'
        f"<tbody>{''.join(row('td', cells) for cells in grid.rows)}</tbody></table></div>"
    )
    if not is_long:
        return made
    return f"<details><summary>{title} ({len(grid.rows)} rows)</summary>{made}</details>"


def _class(grid: Grid, column: str) -> str:
    return ' class="number"' if column in grid.numeric else ""
