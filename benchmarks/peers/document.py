"""What `benchmarks.peers` found, as Markdown."""

import math
import re
import statistics

from benchmarks.peers.exactness import in_words
from benchmarks.peers.ways import STOCK, WAYS

_LONGEST = 160  # characters of an error

LEGEND = """\
Random weights, images and labels; SGD with a rate of 0.01; sparse categorical cross-entropy.

- **peak**: peak resident set size (RSS) during training steps, above the RSS just before them
  (libraries, model, optimizer), in a process of its own. **all** is the whole process at its peak:
  what a way makes once and keeps, such as accumulated gradients, is only in this.
- **CPU**, **wall**: time for the same samples, as a ratio to stock; both train in turn in the same
  process, median of the ratios.
- **exactness**: trained next to stock in the same process, from the same weights, on the same
  batches. The figures are Euclidean distances of all weights to stock's, as a share of what
  training has changed them by: 1e-7 is rounding, 1 another direction altogether. Stock's own
  line is stock trained a second time. A first update off by less than 1e-3 is called rounding;
  later ones amplify it, and so does a deep network of random weights that rounds its forward pass
  otherwise. The line of stock with its learning rate raised by 1e-6 is a control: it shows how
  much, and also how far apart two measurements of the same memory and time come. Moving
  statistics are those of batch normalization.
- `RematScope` is open while the layers are created. `larger_than` has the median of the layers'
  output sizes for threshold, `list_of_layers` all convolutions, dense layers and activations; or
  those without the ones that Keras calls with `training=` (`Dense`), which `tf.recompute_grad`
  does not take in a graph.
- `tf.recompute_grad` runs each residual block (VGG16: each stage, DenseNet: each dense layer) as a
  model of its own, written as its documentation suggests. What a block does besides it does twice:
  moving statistics are updated a second time, and dropout draws for the gradients another mask
  than for the outputs.
- Micro-batches: `SGD(gradient_accumulation_steps=4)` on a fourth of the batch."""


def document(tables, largest, about):
    """The whole document; `tables` are those of `table`, `largest` that of `largest_table`."""
    parts = ["# Ways of training in less memory", LEGEND, *tables]
    if largest:
        parts.append(largest)
    parts.append(about)
    return "\n\n".join(parts) + "\n"


def table(case, found):
    """One model: a line for each way, from what was found of each by task."""
    size = f", {case['image_size']}x{case['image_size']}" if case["image_size"] > 1 else ""
    lines = [
        f"## {title(case)}{size}, batch {case['batch_size']}",
        "",
        "| way | peak | ratio | all | CPU | wall | exactness |",
        "|---|---|---|---|---|---|---|",
    ]
    stock = found[STOCK].get("memory", {})
    lines += [f"| {' | '.join(row(WAYS[way].title, found[way], stock))} |" for way in found]
    return "\n".join(lines)


def title(case):
    return case["model"].partition(":")[2] or case["model"]


def row(name, by_task, stock):
    memory = by_task["memory"]
    if "error" in memory:
        return [name, *[""] * 5, failure(memory)]
    above = memory["peak"] - memory["resident"]
    ratio = math.nan
    if "peak" in stock and stock["peak"] > stock["resident"]:
        ratio = above / (stock["peak"] - stock["resident"])
    timing, exactness = by_task["timing"], by_task["exactness"]
    cpu, wall = ("-" if "error" in timing else times(timing[clock]) for clock in ("cpu", "wall"))
    words = failure(exactness) if "error" in exactness else in_words(exactness)
    if "error" in timing:
        words += f"; time {failure(timing)}"
    share = "-" if math.isnan(ratio) else f"{ratio:.2f}x"
    peaks = [f"{max(0, above) / 1e6:.0f} MB", share, f"{memory['peak'] / 1e6:.0f} MB"]
    return [name, *peaks, cpu, wall, words]


def times(ratios):
    return f"{statistics.median(ratios):.2f}x"


def failure(result):
    # Addresses and names of this run's tensors would change the document every time.
    text = re.sub(r"\s+", " ", result["error"]).replace("|", "\\|").replace("<", "&lt;")
    return f"fails: {text[:_LONGEST]}{'…' if len(text) > _LONGEST else ''}"


def largest_table(case, found):
    """The largest batches, or why there are none."""
    heading = f"## The largest batch in a given memory: {title(case)}"
    if "error" in found:
        return f"{heading}\n\n{failure(found)}"
    batches = found["batches"]
    lines = [
        f"{heading}, {case['image_size']}x{case['image_size']}",
        "",
        f"Each try is a process limited to {found['limit'] / 1e6:.0f} MB of data (RLIMIT_DATA: "
        f"writable memory of its own), what stock needs for a batch of {case['batch_size']}. One "
        "that dies of it, or of anything else, does not train.",
        "",
        "| way | largest batch | ratio |",
        "|---|---|---|",
    ]
    stock = batches.get(STOCK)
    lines += [
        f"| {WAYS[way].title} | {batch} | {batch / stock:.2f}x |"
        if stock
        else f"| {WAYS[way].title} | {batch} | |"
        for way, batch in batches.items()
    ]
    return "\n".join(lines)
