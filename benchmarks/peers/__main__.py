"""`python -m benchmarks.peers`: every way of training in less memory, into docs/benchmarks.md."""

import argparse
import datetime
import hashlib
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from benchmarks.models import machine
from benchmarks.peers import document as documents
from benchmarks.peers.largest import WAYS as LARGEST_WAYS
from benchmarks.peers.largest import largest
from benchmarks.peers.run import Results
from benchmarks.peers.ways import STOCK, WAYS

ROOT = pathlib.Path(__file__).parents[2]
ENCODER = "benchmarks.transformer:encoder"
# Of a model from a function, the image size is of no effect.
CASES = {
    "VGG16": ("VGG16", 96, 32),
    "ResNet50": ("ResNet50", 96, 32),
    "MobileNetV2": ("MobileNetV2", 96, 32),
    "DenseNet121": ("DenseNet121", 64, 32),
    "EfficientNetB0": ("EfficientNetB0", 96, 16),
    "encoder": (ENCODER, 1, 8),
}
QUICK_CASES = {name: (name, 32, 4) for name in CASES} | {
    "encoder": ("benchmarks.transformer:small", 1, 4)
}
LARGEST = "ResNet50"
TASKS = ("memory", "timing", "exactness")


def main():
    options = parse()
    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    cache = ROOT / "out" / ("peers-quick.json" if options.quick else "peers.json")
    results = Results(cache, f"{versions}, code {code()}", options.resume)
    cases = {name: as_case(name, options) for name in options.models}

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(cases) * len(options.ways) * len(TASKS))

        def run(request):
            return results.get(request, options.timeout)

        tables = []
        for case in cases.values():
            found = {}
            for way in options.ways:
                found[way] = {}
                for what in TASKS:
                    progress.update(task, description=f"{documents.title(case)}: {way}, {what}")
                    # Once memory has failed, there is nothing to compare.
                    if "error" not in found[way].get("memory", {}):
                        found[way][what] = run({**case, "task": what, "way": way})
                    progress.advance(task)
            tables.append(documents.table(case, found))

        largest_table = None
        if not options.no_largest:
            case = as_case(LARGEST, options)
            task = progress.add_task("", total=None)  # how many tries it takes is not known
            found = largest(
                run,
                case,
                [way for way in LARGEST_WAYS if way in options.ways],
                2 if options.quick else 4,
                lambda text: progress.update(task, description=f"largest batch: {text}"),
            )
            largest_table = documents.largest_table(case, found)

    about = f"`{command(options)}` on {datetime.date.today()}: {machine()}, {versions}."
    text = documents.document(tables, largest_table, about)
    print(text)
    if not options.dry_run:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


def parse():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=list(CASES), metavar="MODEL", help=f"of: {', '.join(CASES)}"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        metavar="WAY",
        choices=WAYS,
        help=f"besides stock, of: {', '.join(WAYS)}",
    )
    parser.add_argument("--rounds", type=int, default=3, help="of two batches each (default: 3)")
    parser.add_argument(
        "--no-largest", action="store_true", help="leave out the largest batch in a given memory"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny images and batches, to see that all of it runs"
    )
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for a child process")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="default: docs/benchmarks.md; with --quick, out/benchmarks-quick.md",
    )
    parser.add_argument("--dry-run", action="store_true", help="print, write no document")
    parser.add_argument(
        "--resume", action="store_true", help="take what is in out/ already, measure the rest"
    )
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in CASES]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(CASES)}.")
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more.")
    options.ways = [way for way in WAYS if way in {STOCK, *options.ways}]
    if options.output is None:
        quick = ROOT / "out" / "benchmarks-quick.md"
        options.output = quick if options.quick else ROOT / "docs" / "benchmarks.md"
    return options


def code():
    """A digest of what is measured and what measures it: figures of other code are not resumed."""
    digest = hashlib.sha256()
    for folder in ("bittrain_tf", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def as_case(name, options):
    """What a child process needs to know of a model."""
    model, image_size, batch_size = (QUICK_CASES if options.quick else CASES)[name]
    return {
        "model": model,
        "image_size": image_size,
        "batch_size": batch_size,
        "rounds": options.rounds,
    }


def command(options):
    """What gives the same document."""
    words = ["python -m benchmarks.peers"]
    if options.models != list(CASES):
        words += options.models
    words.append(f"--rounds {options.rounds}")
    if options.ways != list(WAYS):
        words.append(f"--ways {' '.join(options.ways)}")
    if options.quick:
        words.append("--quick")
    if options.no_largest:
        words.append("--no-largest")
    return " ".join(words)


if __name__ == "__main__":
    main()
