"""The `bittrain` command: a thin layer over the package's functions.

Exit status: 0, or 1 if a check failed, or 2 if the command cannot be carried out.
Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import rich.console
import rich.progress

import bittrain_tf
from bittrain_tf.analysis import Analysis, Measurement, doctor, plots
from bittrain_tf.analysis.builder import build, check_name
from bittrain_tf.analysis.kept import rows_table, totals_table
from bittrain_tf.analysis.measure import measurements_table, stages
from bittrain_tf.analysis.plan import predicted_cost
from bittrain_tf.analysis.text import WIDTH, table
from bittrain_tf.investigation.data import subject
from bittrain_tf.investigation.investigate import BATCH_SIZES, EPOCHS
from bittrain_tf.investigation.investigate import STAGES as PARTS
from bittrain_tf.investigation.page import check_directory

_OK, _FAILED, _UNUSABLE = 0, 1, 2
_ROWS_SHOWN = 12
_REMAT_MODE = "activations"  # in which it runs on most models
_EXPECTED_ERRORS = (
    FileExistsError,
    ImportError,
    NotImplementedError,
    RuntimeError,
    TimeoutError,
    TypeError,
    ValueError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name; that of the process by
            default.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    errors = rich.console.Console(stderr=True)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # to find the user's package.module, as python -m does
    try:
        return options.run(options, errors)
    except _EXPECTED_ERRORS as error:
        errors.print(f"bittrain: {error}", style="red", markup=False, highlight=False)
        return _UNUSABLE
    except KeyboardInterrupt:
        errors.print("bittrain: interrupted")
        return 130


def _analyze(options: argparse.Namespace, errors: rich.console.Console) -> int:
    """Before and after, side by side; fails if anything sparse is kept dense after."""
    check_name(options.model)
    _check_plot(options)
    with _progress(errors, 3) as say:
        say(f"Building {options.model}")
        model, x, y = build(
            options.model,
            batch_size=options.batch_size,
            image_size=options.image_size,
            seed=options.seed,
            batches=1,
        )
        say("Tracing a step of the stock model")
        stock = bittrain_tf.analyze(model, x, y)
        bittrain_tf.compress(model, codec=options.codec, filters=options.filters)
        say("Tracing a step of the compressed model")
        compressed = bittrain_tf.analyze(model, x, y)
    left = compressed.sparse_dense()
    if options.json:
        _print_json(
            {
                "stock": stock.to_dict(),
                "compressed": compressed.to_dict(),
                "sparse_dense": [row.tensor for row in left],
            }
        )
    else:
        _print_analyses(stock, compressed)
    if options.plot:
        _plot_analyses(options, stock, compressed)
    return _verdict(
        errors, [f"kept dense though sparse: {row.tensor} ({row.layer})" for row in left]
    )


def _plan(options: argparse.Namespace, errors: rich.console.Console) -> int:
    """What a budget comes to, layer by layer; fails if it cannot be met."""
    check_name(options.model)
    _check_plot(options)

    def built() -> tuple[keras.Model, Any, Any]:
        return build(
            options.model,
            batch_size=options.batch_size,
            image_size=options.image_size,
            seed=options.seed,
            batches=1,
        )

    with _progress(errors, 3) as say:
        say(f"Building {options.model}")
        model, x, y = built()
        say("Planning")
        planned = bittrain_tf.plan(
            model,
            x,
            y,
            memory_budget=options.memory_budget,
            time_budget=options.time_budget,
            codec=options.codec,
            filters=options.filters,
        )
        say("Tracing a step with RematScope")
        remat = _rematscope(built)
    if options.json:
        _print_json({**planned.to_dict(), "rematscope": remat})
    else:
        _stdout().print(planned)
    if options.plot:
        points = {"stock": (1.0, 1.0), "this plan": (planned.time_ratio, planned.peak_ratio)}
        if remat is not None:
            ratios = remat["seconds"] / planned.stock_seconds, remat["peak"] / planned.stock_peak
            points[f'RematScope("{_REMAT_MODE}")'] = ratios
        plots.save_curve(
            options.plot,
            f"Training {planned.model}, batch {options.batch_size}: predicted, stock = 1",
            ("time of a step", "peak memory above the resident model"),
            [(ratio, peak / planned.stock_peak) for peak, ratio in planned.points],
            points,
            overwrite=options.overwrite,
        )
    return _OK


def _rematscope(built: Callable[[], tuple[keras.Model, Any, Any]]) -> dict[str, float] | None:
    """What the model takes, built in Keras's own scope of recomputation; None if it fails."""
    try:
        with keras.RematScope(mode=_REMAT_MODE):
            peak, seconds = predicted_cost(*built())
    except Exception:  # whatever goes wrong in there, the plan is not to suffer from it
        return None
    return {"peak": peak, "seconds": seconds}


def _bench(options: argparse.Namespace, errors: rich.console.Console) -> int:
    """Memory and time of each model; fails if a ratio is over its limit."""
    for name in options.models:
        check_name(name)
    _check_plot(options)
    with _progress(errors, stages(options.rounds) * len(options.models)) as say:
        measured = [
            bittrain_tf.measure(
                name,
                batch_size=options.batch_size,
                image_size=options.image_size,
                rounds=options.rounds,
                memory_budget=options.memory_budget,
                time_budget=options.time_budget,
                codec=options.codec,
                filters=options.filters,
                pruning=_pruning(options),
                seed=options.seed,
                timeout=options.timeout,
                progress=say,
            )
            for name in options.models
        ]
    if options.json:
        _print_json([m.to_dict() for m in measured])
    else:
        _stdout().print(measurements_table(measured))
    if options.plot:
        plots.save_bars(
            options.plot,
            "Peak memory of training above the resident model",
            "MB",
            [m.model for m in measured],
            {
                "stock": [m.stock.above_resident / 1e6 for m in measured],
                "compressed": [m.compressed.above_resident / 1e6 for m in measured],
            },
            overwrite=options.overwrite,
        )
    return _verdict(errors, _over_limits(options, measured))


def _investigate(options: argparse.Namespace, errors: rich.console.Console) -> int:
    """Where the memory of training goes, as a page; fails if a part of it could not be had."""
    check_name(options.model)
    directory = options.output or f"investigation-{options.model.replace(':', '-')}"
    check_directory(directory, overwrite=options.overwrite)
    with _progress(errors, 2 + PARTS) as say:
        say(f"Building {options.model}")
        given = subject(
            options.model,
            options.data,
            batch_size=max(options.batch_sizes),
            image_size=options.image_size,
            seed=options.seed,
        )
        found = bittrain_tf.investigate(
            given.model,
            given.x,
            given.y,
            batch_sizes=options.batch_sizes,
            epochs=options.epochs,
            progress=say,
        )
        found = dataclasses.replace(found, random_data=given.is_random)
        say("Drawing")
        found.save(directory, overwrite=options.overwrite)
    if options.json:
        _print_json(found.to_dict())
    else:
        _stdout().print(found)
    errors.print(f"Written: {directory}/index.html", markup=False, highlight=False)
    return _verdict(errors, [f"{part}: {reason}" for part, reason in found.failures.items()])


def _pruning(options: argparse.Namespace) -> dict[str, Any] | None:
    if options.target_sparsity is None:
        return None
    pruning = {"target_sparsity": options.target_sparsity, "mode": options.pruning_mode}
    bittrain_tf.ActivationPruning(**pruning)  # which says what is wrong with them, if anything is
    return pruning


def _doctor(options: argparse.Namespace, errors: rich.console.Console) -> int:
    """What is installed and whether it works; fails if something is broken."""
    with _progress(errors, 1) as say:
        say("Checking the installation")
        found = doctor.checks()
    if options.json:
        _print_json([{"name": c.name, "ok": c.ok, "detail": c.detail} for c in found])
    else:
        rows = [(c.name, "ok" if c.ok else "BROKEN", c.detail) for c in found]
        title = f"bittrain-tf {bittrain_tf.__version__}"
        _stdout().print(table(title, ["check", "", "found"], rows))
    return _verdict(errors, [f"{c.name}: {c.detail}" for c in found if not c.ok])


def _print_analyses(stock: Analysis, compressed: Analysis) -> None:
    out = _stdout()
    out.print(totals_table({"stock": stock, "compressed": compressed}))
    out.print(rows_table("Largest, stock", stock.rows[:_ROWS_SHOWN]))
    out.print(rows_table("Largest, compressed", compressed.rows[:_ROWS_SHOWN]))
    left = compressed.sparse_dense()
    if left:
        out.print(rows_table("Kept dense though sparse, compressed", left))


def _plot_analyses(options: argparse.Namespace, stock: Analysis, compressed: Analysis) -> None:
    kinds = list(dict.fromkeys([*stock.totals, *compressed.totals]))
    plots.save_bars(
        options.plot,
        f"Kept for the backward pass of {options.model}",
        "MB",
        ["stock", "compressed"],
        {kind: [a.totals.get(kind, 0) / 1e6 for a in (stock, compressed)] for kind in kinds},
        stacked=True,
        overwrite=options.overwrite,
    )


def _over_limits(options: argparse.Namespace, measured: Sequence[Measurement]) -> list[str]:
    limits = {"peak_ratio": options.max_peak_ratio, "cpu_ratio": options.max_cpu_ratio}
    return [
        f"{m.model}: {name.replace('_', ' ')} {getattr(m, name):.3f} is over the limit of {limit:g}"
        for m in measured
        for name, limit in limits.items()
        # Not `>`: a ratio that does not exist (NaN) passes no check.
        if limit is not None and not getattr(m, name) <= limit
    ]


def _verdict(errors: rich.console.Console, failures: Sequence[str]) -> int:
    for failure in failures:
        errors.print(f"FAILED {failure}", style="red", markup=False, highlight=False)
    return _FAILED if failures else _OK


def _check_plot(options: argparse.Namespace) -> None:
    """Refuse before the work what would be refused after it."""
    if options.plot:
        plots.check_path(options.plot, overwrite=options.overwrite)


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _stdout() -> rich.console.Console:
    out = rich.console.Console()
    return out if out.is_terminal else rich.console.Console(width=WIDTH)


@contextmanager
def _progress(errors: rich.console.Console, stages: int) -> Iterator[Callable[[str], None]]:
    """A function to call as each of `stages` begins: a progress bar, or lines if no terminal."""
    if not errors.is_terminal:
        yield lambda text: errors.print(text, markup=False, highlight=False)
        return
    columns = [
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
    ]
    with rich.progress.Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=stages)
        begun = False

        def begin(text: str) -> None:
            nonlocal begun
            progress.update(task, description=text, advance=int(begun))
            begun = True

        yield begin


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bittrain", description="Train Keras models in less memory, with the same gradients."
    )
    parser.add_argument("--version", action="version", version=bittrain_tf.__version__)
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    analyze = verbs.add_parser(
        "analyze", help="what a training step keeps for its backward pass, before and after"
    )
    analyze.add_argument("model", help=_MODEL_HELP)
    analyze.set_defaults(run=_analyze)
    _add_common(analyze, batch_size=8, image_size=64)

    plan = verbs.add_parser("plan", help="what to keep and what to rebuild within a budget")
    plan.add_argument("model", help=_MODEL_HELP)
    plan.set_defaults(run=_plan)
    _add_budgets(plan)
    _add_common(plan, batch_size=32, image_size=96)

    bench = verbs.add_parser("bench", help="memory and time of training, in child processes")
    bench.add_argument("models", nargs="+", metavar="model", help=_MODEL_HELP)
    _add_budgets(bench)
    bench.add_argument("--rounds", type=_positive, default=3, help="rounds (%(default)s)")
    bench.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="for each child process (%(default)s)",
    )
    bench.add_argument(
        "--target-sparsity",
        type=float,
        metavar="SHARE",
        help="prune activations of the compressed model to this share of zeros",
    )
    bench.add_argument(
        "--pruning-mode",
        choices=("forward", "saved"),
        default="forward",
        help="what is pruned: outputs, or what is saved of them (%(default)s)",
    )
    bench.add_argument(
        "--max-peak-ratio",
        type=float,
        metavar="RATIO",
        help="fail if the peak above the resident model is more than this of stock's",
    )
    bench.add_argument(
        "--max-cpu-ratio",
        type=float,
        metavar="RATIO",
        help="fail if a step takes more than this of stock's CPU time",
    )
    bench.set_defaults(run=_bench)
    _add_common(bench, batch_size=32, image_size=96)

    investigate = verbs.add_parser(
        "investigate", help="where the memory of training goes, and how sparse activations are"
    )
    investigate.add_argument("model", help=_MODEL_HELP)
    investigate.add_argument(
        "--data", metavar="FILE.npz", help="arrays x and y to train on and to probe with"
    )
    investigate.add_argument(
        "--batch-sizes",
        type=_batch_sizes,
        default=BATCH_SIZES,
        metavar="N,N,...",
        help=f"samples ({','.join(map(str, BATCH_SIZES))})",
    )
    investigate.add_argument(
        "--epochs",
        type=_count,
        default=EPOCHS,
        help="of training to watch sparsity over; the model is not kept (%(default)s)",
    )
    _add_data(investigate, image_size=64)
    investigate.add_argument(
        "--output", metavar="DIR", help="folder of the page and figures (investigation-MODEL)"
    )
    investigate.add_argument(
        "--overwrite", action="store_true", help="replace a page and figures that exist"
    )
    investigate.set_defaults(run=_investigate)

    check = verbs.add_parser("doctor", help="whether everything needed is there and works")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_doctor)
    return parser


_MODEL_HELP = (
    "a model of keras.applications, or package.module:function, a function that returns "
    "(compiled model, x, y)"
)


def _add_common(parser: argparse.ArgumentParser, *, batch_size: int, image_size: int) -> None:
    parser.add_argument(
        "--batch-size", type=_positive, default=batch_size, help="samples (%(default)s)"
    )
    _add_data(parser, image_size=image_size)
    parser.add_argument("--codec", default="bitmap", help="codec (%(default)s)")
    parser.add_argument(
        "--filters", metavar="REGEX", help="compress only layers whose name this is found in"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="save a chart")
    parser.add_argument("--overwrite", action="store_true", help="replace the chart if it exists")


def _add_data(parser: argparse.ArgumentParser, *, image_size: int) -> None:
    parser.add_argument(
        "--image-size",
        type=_positive,
        default=image_size,
        help="height and width, for keras.applications (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_budgets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-budget",
        type=_budget,
        metavar="SHARE|BYTES",
        help="peak memory allowed: a share of the stock model's such as 0.5, or bytes",
    )
    parser.add_argument(
        "--time-budget",
        type=float,
        metavar="RATIO",
        help="time of a step allowed, as a ratio to the stock model's",
    )


def _budget(text: str) -> float | int:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(size.strip()) for size in text.split(","))
