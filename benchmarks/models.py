"""`make bench`: models of keras.applications, stock against compressed, into README.md."""

import argparse
import datetime
import os
import pathlib
import platform

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

import bittrain_tf as bt

MODELS = ("VGG16", "ResNet50", "MobileNetV2", "DenseNet121")
README = pathlib.Path(__file__).parents[1] / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
_STAGES = 3  # child processes of a measurement


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print, leave README.md alone")
    options = parser.parse_args()

    console = Console(stderr=True)
    measured = []
    with Progress(console=console) as progress:
        task = progress.add_task("", total=_STAGES * len(options.models))
        begun = 0

        def say(text):
            nonlocal begun
            progress.update(task, description=text, completed=begun)
            begun += 1

        for model in options.models:
            measured.append(
                bt.measure(
                    model,
                    batch_size=options.batch_size,
                    image_size=options.image_size,
                    rounds=options.rounds,
                    progress=say,
                )
            )
        progress.update(task, completed=begun)

    text = section(measured, options)
    print(text)
    if not options.dry_run:
        README.write_text(replaced(README.read_text(), text))


def section(measured, options):
    """The table as Markdown, and how it was made."""
    size = options.image_size
    lines = [
        f"Training at {size}x{size}, batch {options.batch_size}; peak memory above the resident "
        "model:",
        "",
        "| | stock | compressed | memory | CPU time | all of the process, at its peak |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.model} | {m.stock.above_resident / 1e6:.0f} MB "
        f"| {m.compressed.above_resident / 1e6:.0f} MB "
        f"| {m.peak_ratio:.2f}x | {m.cpu_ratio:.2f}x "
        f"| {m.stock.peak / 1e6:.0f} -> {m.compressed.peak / 1e6:.0f} MB |"
        for m in measured
    ]
    command = f"bittrain bench {' '.join(options.models)} --batch-size {options.batch_size}"
    command += f" --image-size {size} --rounds {options.rounds}"
    lines += [
        "",
        f"`{command}` on {datetime.date.today()}: {machine()}, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}.",
    ]
    return "\n".join(lines)


def replaced(readme, text):
    """`readme` with `text` between the markers."""
    before, found_start, rest = readme.partition(START)
    _, found_end, after = rest.partition(END)
    if not (found_start and found_end):
        raise SystemExit(f"README.md has no {START} ... {END} to put the table in.")
    return f"{before}{START}\n{text}\n{END}{after}"


def machine():
    """Cores and processor."""
    cores = len(os.sched_getaffinity(0))
    name = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{cores} cores of {name}"


if __name__ == "__main__":
    main()
