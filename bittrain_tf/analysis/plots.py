"""Charts. Needs the `plots` extra; matplotlib is imported only when one is drawn."""

from __future__ import annotations

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM_FOR_NAMES = 100  # characters on a horizontal axis


def save_bars(
    path: str | os.PathLike[str],
    title: str,
    unit: str,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    stacked: bool = False,
    overwrite: bool = False,
) -> None:
    """Draw horizontal bars, the first label on top, and save them.

    Args:
        path: The file to write; its ending says the format (`.png`, `.svg`, `.pdf`).
        title: Title of the chart.
        unit: What the horizontal axis counts.
        labels: A label for each group of bars.
        series: For each name in the legend, a value for each label.
        stacked: One bar a label, the series end to end, instead of a bar for each.
        overwrite: Whether an existing file may be replaced.

    Raises:
        ImportError: If matplotlib is not installed.
        FileExistsError: If the file exists and `overwrite` is False.
        ValueError: If the ending is of no known format.
    """
    bars_per_label = 1 if stacked else len(series)
    height = 0.8 / bars_per_label
    check_path(path, overwrite=overwrite)
    figure = _figure(9, 1.5 + 0.3 * len(labels) * bars_per_label)
    axes = figure.add_subplot()
    ends = [0.0] * len(labels)
    for i, (name, values) in enumerate(series.items()):
        shift = 0.0 if stacked else (i - (bars_per_label - 1) / 2) * height
        axes.barh([y + shift for y in range(len(labels))], values, height, left=ends, label=name)
        if stacked:
            ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=len(series))
    figure.savefig(path)


def save_curve(
    path: str | os.PathLike[str],
    title: str,
    axes_titles: tuple[str, str],
    curve: Sequence[tuple[float, float]],
    points: Mapping[str, tuple[float, float]],
    *,
    overwrite: bool = False,
) -> None:
    """Draw a curve and points beside it, and save them.

    Args:
        path: As of `save_bars`.
        title: Title of the chart.
        axes_titles: What the horizontal and the vertical axis are.
        curve: The corners of the curve.
        points: For each name in the legend, a point.
        overwrite: As of `save_bars`.

    Raises:
        ImportError: As `save_bars`.
        FileExistsError: As `save_bars`.
        ValueError: As `save_bars`.
    """
    check_path(path, overwrite=overwrite)
    figure = _figure(7, 5)
    axes = figure.add_subplot()
    axes.plot(*zip(*curve, strict=True), drawstyle="steps-post", marker=".", label="plans")
    for (name, (x, y)), marker in zip(points.items(), itertools.cycle("s^vDP*")):
        axes.plot([x], [y], marker, markersize=9, label=name)
    _label(axes, title, axes_titles)
    figure.savefig(path)


def save_steps(
    path: str | os.PathLike[str],
    title: str,
    axes_titles: tuple[str, str],
    series: Mapping[str, Sequence[float]],
    *,
    overwrite: bool = False,
) -> None:
    """Draw values that hold from one step to the next, and save them.

    Args:
        path: As of `save_bars`.
        title: Title of the chart.
        axes_titles: What the horizontal and the vertical axis are.
        series: For each name in the legend, a value for each step.
        overwrite: As of `save_bars`.

    Raises:
        ImportError: As `save_bars`.
        FileExistsError: As `save_bars`.
        ValueError: As `save_bars`.
    """
    check_path(path, overwrite=overwrite)
    figure = _figure(9, 4)
    axes = figure.add_subplot()
    for name, values in series.items():
        axes.plot(range(len(values)), values, drawstyle="steps-post", linewidth=1, label=name)
    _label(axes, title, axes_titles)
    figure.savefig(path)


def save_lines(
    path: str | os.PathLike[str],
    title: str,
    axes_titles: tuple[str, str],
    xs: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    in_order: bool = False,
    overwrite: bool = False,
) -> None:
    """Draw lines through shares (0 to 1), and save them.

    Args:
        path: As of `save_bars`.
        title: Title of the chart.
        axes_titles: What the horizontal and the vertical axis are.
        xs: What the values of a series belong to, in words.
        series: For each name in the legend, a value for each of `xs`.
        in_order: The series are stages of one thing: colours from dark to light.
        overwrite: As of `save_bars`.

    Raises:
        ImportError: As `save_bars`.
        FileExistsError: As `save_bars`.
        ValueError: As `save_bars`.
    """
    check_path(path, overwrite=overwrite)
    from matplotlib import colormaps

    long_names = max(map(len, xs)) * len(xs) > _ROOM_FOR_NAMES
    figure = _figure(max(9, 0.16 * len(xs)), 6 if long_names else 4.5)
    axes = figure.add_subplot()
    for i, (name, values) in enumerate(series.items()):
        color = colormaps["viridis"](0.9 * i / max(1, len(series) - 1)) if in_order else None
        # In turn, as colours repeat.
        marker, line = "os^vD"[i % 5], ("-", "--", ":")[0 if in_order else i // 10 % 3]
        axes.plot(
            range(len(xs)), values, line, marker=marker, markersize=4, color=color, label=name
        )
    _label(axes, title, axes_titles)
    axes.set_ylim(-0.02, 1.02)
    rotation = {"rotation": 90, "fontsize": 7} if long_names else {}
    axes.set_xticks(range(len(xs)), xs, **rotation)
    if axes.get_legend():
        axes.get_legend().remove()
    figure.legend(loc="outside lower center", ncols=min(6, len(series)))
    figure.savefig(path)


def save_ratios(
    path: str | os.PathLike[str],
    title: str,
    axes_titles: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    overwrite: bool = False,
) -> None:
    """Draw points whose vertical coordinate is a ratio, with a line at 1, and save them.

    Args:
        path: As of `save_bars`.
        title: Title of the chart.
        axes_titles: What the horizontal axis, from 0 to 1, and the vertical one are.
        series: For each name in the legend, its points.
        overwrite: As of `save_bars`.

    Raises:
        ImportError: As `save_bars`.
        FileExistsError: As `save_bars`.
        ValueError: As `save_bars`.
    """
    check_path(path, overwrite=overwrite)
    from matplotlib.ticker import FormatStrFormatter

    figure = _figure(8, 5)
    axes = figure.add_subplot()
    for (name, points), marker in zip(series.items(), itertools.cycle("os^vDP*")):
        axes.plot(*zip(*points, strict=True), marker, markersize=5, alpha=0.6, label=name)
    axes.axhline(1, color="black", linewidth=1)
    _label(axes, title, axes_titles)
    axes.set_xlim(-0.02, 1.02)
    # Ratios of a half and of two are equally far from one.
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.autoscale(axis="y")
    figure.savefig(path)


def _label(axes: Axes, title: str, axes_titles: tuple[str, str]) -> None:
    axes.set_xlabel(axes_titles[0])
    axes.set_ylabel(axes_titles[1])
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()


def _figure(width: float, height: float) -> Figure:
    # Not pyplot, whose global state and choice of a window system belong to the caller.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_path(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Raise now what `save_bars` would raise for `path` after the work is done.

    Raises:
        ImportError: If matplotlib is not installed.
        FileExistsError: If the file exists and `overwrite` is False.
        ValueError: If the ending is of no known format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ImportError(
            "Plots need matplotlib, which is not installed. Install it with: "
            "pip install bittrain-tf[plots]"
        ) from None
    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    ending = pathlib.Path(path).suffix.lstrip(".").lower()
    if ending not in known:
        raise ValueError(f"Cannot tell the format of {os.fspath(path)!r}; end it with {known}.")
    if pathlib.Path(path).exists() and not overwrite:
        raise FileExistsError(
            f"{os.fspath(path)} exists already; choose another name or pass overwrite=True."
        )
