"""The `tflite-tools` command: a thin layer over the package's functions.

Exit status: 0, or 1 if a check failed, or 2 if the command cannot be carried out. Results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import keras

from bittrain_tf.analysis import plots
from bittrain_tf.analysis.text import size_text, table, to_text
from tflite_tools import inspection
from tflite_tools.exporting import export
from tflite_tools.scheduling import Scheduled, schedule
from tflite_tools.verification import verify

_OK, _FAILED, _UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the program's name; that of the process by default.

    Returns:
        The exit status.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (OSError, ImportError, ValueError) as error:
        print(f"tflite-tools: {error}", file=sys.stderr)
        return _UNUSABLE


def _load(path: pathlib.Path) -> keras.Model:
    try:
        return keras.models.load_model(path)
    except TypeError as error:  # as Keras says that it does not know a class
        raise ValueError(f"{path} cannot be loaded on its own: {error}") from error


def _export(options: argparse.Namespace) -> int:
    model = _load(options.file)
    missing = [
        f"--{name}"
        for name in ("loss", "optimizer")
        if getattr(options, name) is None and getattr(model, name, None) is None
    ]
    if missing:
        raise ValueError(
            f"{options.file} was not saved with them: give {' and '.join(missing)}, or save the "
            "model compiled."
        )
    exported = export(
        model,
        options.output,
        loss=options.loss or model.loss,
        optimizer=options.optimizer or model.optimizer,
        batch_size=options.batch_size,
        metrics=options.metric,
        sample_weight=options.sample_weight,
        time_budget=options.time_budget,
        overwrite=options.overwrite,
    )
    if options.json:
        print(json.dumps(exported.manifest, indent=2))
    else:
        print(f"{exported.path}: {size_text(exported.nbytes)}")
        print(_scheduled_table(list(exported.scheduled.values())))
    return _OK


def _inspect(options: argparse.Namespace) -> int:
    """Fails if there is an operator that is not a builtin one."""
    if options.plot is not None:
        plots.check_path(options.plot, overwrite=options.overwrite)
    inspected = inspection.inspect(options.file)
    if options.signature is not None:
        names = [i.name for i in inspected]
        inspected = [i for i in inspected if i.name == options.signature]
        if not inspected:
            raise ValueError(
                f"{options.file} has no signature {options.signature!r}; it has {', '.join(names)}."
            )
    if options.json:
        shown = [
            {**dataclasses.asdict(i), "peak": i.peak, "peak_scheduled": i.peak_scheduled}
            for i in inspected
        ]
        print(json.dumps(shown, indent=2))
    else:
        print("\n".join(i.render() for i in inspected))
    if options.plot is not None:
        largest = max(inspected, key=lambda i: i.peak)
        inspection.plot(largest, options.plot, overwrite=options.overwrite)
    custom = sorted({name for i in inspected for name in i.custom})
    if custom:
        print(f"tflite-tools: not builtin operators: {', '.join(custom)}", file=sys.stderr)
    return _FAILED if custom else _OK


def _schedule(options: argparse.Namespace) -> int:
    scheduled = schedule(
        options.file, options.output, time_budget=options.time_budget, overwrite=options.overwrite
    )
    if options.json:
        print(json.dumps([dataclasses.asdict(s) for s in scheduled], indent=2))
    else:
        print(_scheduled_table(scheduled))
    return _OK


def _verify(options: argparse.Namespace) -> int:
    """Fails if the file does not train as the model does."""
    reference = _load(options.model)
    verified = verify(options.file, reference, steps=options.steps, measured=not options.no_measure)
    if options.json:
        shown = {**dataclasses.asdict(verified), "ok": verified.ok}
        print(json.dumps(shown, indent=2, default=str))
    else:
        print(verified.render())
    return _OK if verified.ok else _FAILED


def _scheduled_table(scheduled: Sequence[Scheduled]) -> str:
    columns = ("subgraph", "operators", "peak before", "peak after")
    rows = [
        (s.subgraph, str(s.operators), size_text(s.before), size_text(s.after)) for s in scheduled
    ]
    return to_text(table("Peak of live bytes", columns, rows, columns[1:]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tflite-tools",
        description="Make .tflite files that train, look at them, and make them take less memory.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("export", help="write a .tflite that trains a Keras model")
    command.add_argument("file", type=pathlib.Path, help="a model, saved as .keras")
    command.add_argument("output", type=pathlib.Path, help="where to write the .tflite")
    command.add_argument(
        "--batch-size", type=int, required=True, metavar="N", help="the size of every batch"
    )
    for name in ("loss", "optimizer"):
        command.add_argument(
            f"--{name}", metavar="NAME", help="Keras's name of it; by default as compiled"
        )
    command.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="Keras's name of a metric function, to be reported with the loss; again for more",
    )
    command.add_argument("--sample-weight", action="store_true", help="samples have weights")
    command.add_argument(
        "--time-budget",
        type=float,
        default=1.1,
        metavar="RATIO",
        help="how long a step may take, to one that keeps all it needs (default: 1.1)",
    )
    command.set_defaults(run=_export)
    _add_output(command)

    command = commands.add_parser(
        "inspect", help="peak, what is alive then, operators; fails on custom operators"
    )
    command.add_argument("--signature", help="only this one")
    command.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="draw the signature of the highest peak over time, as it is and scheduled",
    )
    command.set_defaults(run=_inspect)
    _add_common(command)

    command = commands.add_parser("schedule", help="an order of operators that takes less memory")
    command.add_argument(
        "--time-budget",
        type=float,
        default=1.0,
        metavar="RATIO",
        help="how long a run may take, to what it takes now: beyond 1, tensors are made again",
    )
    command.set_defaults(run=_schedule)
    _add_common(command)
    command.add_argument("output", type=pathlib.Path, help="where to write the other")

    command = commands.add_parser(
        "verify", help="train in LiteRT and in Keras, compare; fails if they differ"
    )
    command.add_argument(
        "--model",
        type=pathlib.Path,
        required=True,
        metavar="FILE.keras",
        help="the model, saved with the loss and the optimizer it was compiled with",
    )
    command.add_argument("--steps", type=int, default=5, help="how many steps to compare")
    command.add_argument(
        "--no-measure", action="store_true", help="leave out what a step takes in memory and time"
    )
    command.set_defaults(run=_verify)
    _add_common(command)
    return parser


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=pathlib.Path, help="a .tflite")
    _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--overwrite", action="store_true", help="replace what is there")
