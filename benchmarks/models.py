"""`make bench`: models stock against compressed, and within budgets, into README.md."""

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
from bittrain_tf.analysis.measure import stages

MODELS = ("VGG16", "ResNet50", "MobileNetV2", "DenseNet121")
README = pathlib.Path(__file__).parents[1] / "README.md"
BUDGETED = {  # and the sizes of images and batches
    "VGG16": (96, 32),
    "ResNet50": (96, 32),
    "MobileNetV2": (96, 32),
    "DenseNet121": (64, 32),
    "EfficientNetB0": (96, 16),
    "benchmarks.transformer:encoder": (1, 8),
}
BUDGETS = (1.05, 1.25)  # times stock's time


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true", help="print, leave README.md alone")
    options = parser.parse_args()

    plain = [(name, options.image_size, options.batch_size, None) for name in options.models]
    budgeted = [(name, *BUDGETED[name], budget) for name in BUDGETED for budget in BUDGETS]
    measured = measure_all([*plain, *budgeted], options.rounds)
    texts = {
        "bench": section(measured[: len(plain)], options),
        "budget": budget_section(measured[len(plain) :]),
    }
    print("\n\n".join(texts.values()))
    if not options.dry_run:
        readme = README.read_text()
        for marker, text in texts.items():
            readme = replaced(readme, marker, text)
        README.write_text(readme)


def measure_all(cases, rounds):
    """A measurement of each model, image size, batch size and time budget."""
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("", total=stages(rounds) * len(cases))
        begun = 0

        def say(text):
            nonlocal begun
            progress.update(task, description=text, completed=begun)
            begun += 1

        measured = [
            bt.measure(
                name,
                image_size=image_size,
                batch_size=batch_size,
                time_budget=budget,
                rounds=rounds,
                progress=say,
            )
            for name, image_size, batch_size, budget in cases
        ]
        progress.update(task, completed=begun)
    return measured


def budget_section(measured):
    """The table of time budgets as Markdown, a line for each model."""
    heads = [f"memory, time_budget={budget} | CPU time" for budget in BUDGETS]
    lines = [
        f"| of stock | {' | '.join(heads)} |",
        f"|---|{'---|' * (2 * len(BUDGETS))}",
    ]
    for i in range(0, len(measured), len(BUDGETS)):
        row = measured[i : i + len(BUDGETS)]
        size, batch_size = BUDGETED[row[0].model]
        images = f"{size}x{size}, " if size > 1 else ""
        figures = " | ".join(f"{m.peak_ratio:.2f}x | {m.cpu_ratio:.2f}x" for m in row)
        name = row[0].model.replace("benchmarks.transformer:encoder", "transformer encoder")
        lines.append(f"| {name} {images}batch {batch_size} | {figures} |")
    return "\n".join([*lines, "", f"`make bench` on {datetime.date.today()}, as above."])


def section(measured, options):
    """The table as Markdown, and how it was made."""
    size = options.image_size
    lines = [
        f"Training at {size}x{size}, batch {options.batch_size}; the most memory of the process:",
        "",
        "| | stock | compressed | of stock | above the model | CPU time |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {m.model} | {m.stock.peak / 1e6:.0f} MB | {m.compressed.peak / 1e6:.0f} MB "
        f"| {m.rss_ratio:.2f}x "
        f"| {m.stock.above_resident / 1e6:.0f} -> {m.compressed.above_resident / 1e6:.0f} MB, "
        f"{m.peak_ratio:.2f}x | {m.cpu_ratio:.2f}x |"
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


def replaced(readme, marker, text):
    """`readme` with `text` between the comments of that name."""
    start, end = f"<!-- {marker}:start -->", f"<!-- {marker}:end -->"
    before, found_start, rest = readme.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise SystemExit(f"README.md has no {start} ... {end} to put the table in.")
    return f"{before}{start}\n{text}\n{end}{after}"


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
