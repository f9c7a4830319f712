"""`python -m benchmarks.accuracy`: what pruning does to accuracy, into docs/pruning.md."""

import argparse
import datetime
import os
import pathlib
import statistics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.accuracy.child import FASHION, WAYS
from benchmarks.models import machine, replaced
from benchmarks.peers.run import Results

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "pruning.md"
SEEDS = (0, 1, 2)
_ROUNDS = 2
# Peaks of less than this are those of memory that was free all along.
_SMALLEST_PEAK = 20e6

# Of each: the epochs, and the batch size.
SIZES = {"digits": (30, 64), "fashion": (12, 64)}
_SAVED = [way for way in WAYS if way.startswith("saved")]
_MASKED = [way for way in WAYS if way.startswith("double")]
CASES = {
    f"{data}{', batch normalization' if normalized else ''}{', fine-tuning' if tuned else ''}": (
        data,
        normalized,
        tuned,
    )
    for data in SIZES
    for normalized, tuned in ((False, False), (True, False), (True, True))
}


def ways_of(normalized, fine_tuning):
    """The ways that say something of such a network."""
    if fine_tuning:
        return ["stock", *_SAVED]
    return [way for way in WAYS if normalized or way not in _MASKED]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--fashion", default=FASHION, metavar="FOLDER", help="of Fashion-MNIST")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run found")
    parser.add_argument("--dry-run", action="store_true", help="print, leave the document alone")
    options = parser.parse_args()
    unknown = [case for case in options.cases if case not in CASES]
    if unknown:
        parser.error(f"no such case: {unknown}; there are {list(CASES)}")
    chosen = options.cases or list(CASES)
    if any("fashion" in case for case in chosen) and not pathlib.Path(options.fashion).is_dir():
        parser.error(
            f"{options.fashion} is not there: apt install dataset-fashion-mnist, or "
            "give the folder of its files with --fashion"
        )
    about = {"tensorflow": tf.__version__, "keras": keras.__version__, "machine": machine()}
    results = Results(
        ROOT / "out" / "accuracy.json", about, options.resume, "benchmarks.accuracy.child"
    )
    text = section(found_for(chosen, options.fashion, results))
    print(text)
    if not options.dry_run:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), "accuracy", text))


def found_for(cases, folder, results):
    """What was found of each way of each case: the trainings by seed, and the ratio of time."""
    with Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as progress:
        ways = {case: ways_of(*CASES[case][1:]) for case in cases}
        total = sum(len(of_case) + 1 for of_case in ways.values())
        bar = progress.add_task("", total=total)

        def get(request, what):
            progress.update(bar, description=what)
            result = results.get(request, timeout=3600)
            progress.advance(bar)
            if "error" in result:
                raise SystemExit(f"{what}: {result['error']}")
            return result

        found = {}
        for case in cases:
            data, normalized, fine_tuning = CASES[case]
            epochs, batch_size = SIZES[data]
            common = {
                "data": data,
                "folder": folder,
                "normalized": normalized,
                "fine_tuning": fine_tuning,
                "epochs": epochs,
                "batch_size": batch_size,
            }
            timing = {**common, "task": "timing", "ways": ways[case], "rounds": _ROUNDS}
            seconds = get(timing, f"{case}: time")
            training = {**common, "task": "memory", "seeds": SEEDS}
            found[case] = {
                way: (get({**training, "way": way}, f"{case}: {way}")["runs"], seconds[way])
                for way in ways[case]
            }
    return found


def section(found):
    """The tables as Markdown, and how they were made."""
    lines = []
    for case, ways in found.items():
        epochs, batch_size = SIZES[CASES[case][0]]
        lines += [
            f"**{case[0].upper()}{case[1:]}** ({epochs} epochs, batch {batch_size}):",
            "",
            "| | accuracy | difference | sparsity | kept | peak | CPU time |",
            "|---|---|---|---|---|---|---|",
        ]
        stock, _ = ways["stock"]
        lines += [_line(way, runs, stock, seconds) for way, (runs, seconds) in ways.items()]
        lines.append("")
    lines.append(
        f"`python -m benchmarks.accuracy` on {datetime.date.today()}: {machine()}, TensorFlow "
        f"{tf.__version__}, Keras {keras.__version__}."
    )
    return "\n".join(lines)


def _line(way, runs, stock, seconds):
    accuracies = [100 * run["accuracy"] for run in runs]
    mean, spread = statistics.mean(accuracies), statistics.stdev(accuracies)
    difference = mean - statistics.mean(100 * run["accuracy"] for run in stock)
    kept = _ratio(runs, stock, "kept")
    large = statistics.mean(run["peak"] for run in stock) >= _SMALLEST_PEAK
    peak = f"{_ratio(runs, stock, 'peak'):.2f}x" if large else ""
    sparsities = [run["sparsity"] for run in runs if run["sparsity"] is not None]
    sparsity = f"{statistics.mean(sparsities):.1%}" if sparsities else ""
    return (
        f"| {way} | {mean:.2f} ± {spread:.2f} | {difference:+.2f} | {sparsity} "
        f"| {kept:.2f}x | {peak} | {seconds:.2f}x |"
    )


def _ratio(runs, stock, what):
    return statistics.mean(r[what] for r in runs) / statistics.mean(r[what] for r in stock)


if __name__ == "__main__":
    main()
