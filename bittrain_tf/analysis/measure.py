"""`measure`: memory and time of training, stock against compressed.

Computed sizes are not what a process takes, so memory is the operating system's figure: the
peak RSS of a process that is told nothing about memory, planning and tracing included. Stock
and compressed train in a process of their own each, in turn, a round the one and a round the
other; so memory and time are those of the same process.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bittrain_tf.analysis import rss
from bittrain_tf.analysis.builder import check_name
from bittrain_tf.analysis.plan import check_budgets
from bittrain_tf.analysis.text import size_text, table, to_text
from bittrain_tf.analysis.worker import worker
from bittrain_tf.codecs import get_codec

if TYPE_CHECKING:
    from rich.table import Table

_CHILD = ["-m", "bittrain_tf.analysis.child"]


def stages(rounds: int) -> int:
    """How often `measure` reports progress."""
    return 3 + rounds


@dataclasses.dataclass(frozen=True)
class Figures:
    """What training takes of one kind of model.

    Attributes:
        resident: RSS with the stock model, before it is compressed or trained, in bytes.
        peak: Peak RSS from then on, in bytes: planning, tracing and all steps.
        cpu: CPU seconds a step, all cores together, median of the rounds.
        wall: Wall seconds a step, median of the rounds.
        final_loss: Mean loss of the last round.
    """

    resident: int
    peak: int
    cpu: float
    wall: float
    final_loss: float

    @property
    def above_resident(self) -> int:
        """Bytes that training takes above the resident model."""
        return self.peak - self.resident


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Training of one model, stock against compressed.

    Attributes:
        model: The model, as it was named.
        batch_size: Samples in a batch.
        image_size: Height and width of the images; of no effect on models from functions.
        rounds: Rounds measured, of two steps each.
        codec: The codec of the compressed model.
        stock: What the stock model takes.
        compressed: What the compressed model takes.
        cpu_ratio: CPU time, compressed to stock: median of the ratios of the rounds, in
            each of which both are measured.
        wall_ratio: Wall time, likewise.
    """

    model: str
    batch_size: int
    image_size: int
    rounds: int
    codec: str
    stock: Figures
    compressed: Figures
    cpu_ratio: float
    wall_ratio: float

    @property
    def peak_ratio(self) -> float:
        """Peak above the resident model, compressed to stock; NaN if stock shows none."""
        return _ratio(self.compressed.above_resident, self.stock.above_resident)

    @property
    def rss_ratio(self) -> float:
        """Peak RSS as a whole, compressed to stock."""
        return _ratio(self.compressed.peak, self.stock.peak)

    @property
    def losses_equal(self) -> bool:
        """Whether both have the same final loss, to the last bit."""
        return self.stock.final_loss == self.compressed.final_loss

    def render(self) -> str:
        """The figures, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has (a ratio that does not exist is None)."""
        kinds = {
            kind: {**dataclasses.asdict(figures), "above_resident": figures.above_resident}
            for kind, figures in (("stock", self.stock), ("compressed", self.compressed))
        }
        ratios = {
            "peak_ratio": self.peak_ratio,
            "rss_ratio": self.rss_ratio,
            "cpu_ratio": self.cpu_ratio,
            "wall_ratio": self.wall_ratio,
        }
        return {
            **dataclasses.asdict(self),
            **kinds,
            **{name: None if math.isnan(value) else value for name, value in ratios.items()},
            "losses_equal": self.losses_equal,
        }

    def __rich__(self) -> Table:
        """What rich prints."""
        return measurements_table([self])


def measurements_table(measurements: Sequence[Measurement]) -> Table:
    """A line for each measurement; ratios are compressed to stock."""
    columns = ["stock", "compressed", "ratio", "above the model", "its ratio", "CPU", "wall"]
    return table(
        "Peak of the whole process, and above the resident model; compressed to stock",
        ["model", "batch", *columns, "final losses"],
        (
            (
                m.model,
                str(m.batch_size),
                size_text(m.stock.peak),
                size_text(m.compressed.peak),
                f"{m.rss_ratio:.2f}",
                f"{size_text(m.stock.above_resident)} -> {size_text(m.compressed.above_resident)}",
                f"{m.peak_ratio:.2f}",
                f"{m.cpu_ratio:.2f}",
                f"{m.wall_ratio:.2f}",
                "equal"
                if m.losses_equal
                else f"{m.stock.final_loss:.7g} / {m.compressed.final_loss:.7g}",
            )
            for m in measurements
        ),
        numeric=["batch", *columns],
    )


def measure(
    model: str,
    *,
    batch_size: int = 32,
    image_size: int = 96,
    rounds: int = 3,
    memory_budget: float | int | None = None,
    time_budget: float | None = None,
    codec: str = "bitmap",
    filters: str | Sequence[str] | None = None,
    pruning: dict[str, Any] | None = None,
    seed: int = 0,
    timeout: float = 1800.0,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure training of a model, stock against compressed, in a child process each.

    The machine has to have the memory for both.

    Args:
        model: `"package.module:function"`, a function returning `(compiled model, x, y)`
            that the child processes can import; or the name of a model of
            `keras.applications`, trained on random images.
        batch_size: Samples in a batch.
        image_size: Height and width of the images, for `keras.applications`.
        rounds: Rounds to measure, of two training steps each, after one that traces.
        memory_budget: See `compress`; the data is the sample.
        time_budget: See `compress`.
        codec: See `compress`.
        filters: See `compress`; a regular expression or a list of names.
        pruning: Arguments of `ActivationPruning` for the compressed model, `ramp` apart, which
            is 0: what is measured is a step at the target. By default nothing is pruned.
        seed: Seed of weights and data.
        timeout: Seconds a child process may take for a round, or to build the model and plan.
        progress: Called with a line of text as each stage starts.

    Returns:
        The figures of both and their ratios; see `Measurement`.

    Raises:
        TypeError: If `filters` is a function, which a child process cannot be given.
        ValueError: If there is no such model or codec, or a number is out of range.
        RuntimeError: If memory cannot be measured here, or a child process fails; with
            the end of what that wrote.
        TimeoutError: If a child process takes too long.
    """
    check_name(model)
    get_codec(codec)
    check_budgets(memory_budget, time_budget)
    for name, value in (("batch_size", batch_size), ("image_size", image_size), ("rounds", rounds)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an int of 1 or more, got {value!r}.")
    if callable(filters):
        raise TypeError(
            "filters must be a regular expression or a list of layer names here: a function "
            "cannot be handed to a child process."
        )
    rss.check_supported()
    plain = filters if filters is None or isinstance(filters, str) else list(filters)
    options = {
        "memory_budget": memory_budget,
        "time_budget": time_budget,
        "codec": codec,
        "filters": plain,
    }
    request = {
        "model": model,
        "batch_size": batch_size,
        "image_size": image_size,
        "rounds": rounds,
        "seed": seed,
        "pruning": pruning,
    }

    def say(text: str) -> None:
        if progress is not None:
            progress(f"{model}: {text}")

    about = {"what": f"measuring {model}", "timeout": timeout}
    with worker(_CHILD, **about) as stock, worker(_CHILD, **about) as compressed:
        ask = {"stock": stock, "compressed": compressed}
        say("stock model")
        resident = {"stock": stock({**request, "compress": None})["resident"]}
        say("compressed model")
        resident["compressed"] = compressed({**request, "compress": options})["resident"]
        say("first steps")
        for train in ask.values():
            train("round")
        in_rounds = []
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            in_rounds.append({kind: train("round") for kind, train in ask.items()})
    figures = {
        kind: Figures(
            resident[kind],
            in_rounds[-1][kind]["peak"],
            *(statistics.median(r[kind][clock] for r in in_rounds) for clock in ("cpu", "wall")),
            in_rounds[-1][kind]["loss"],
        )
        for kind in ask
    }
    ratios = {
        f"{clock}_ratio": statistics.median(
            _ratio(figures["compressed"][clock], figures["stock"][clock]) for figures in in_rounds
        )
        for clock in ("cpu", "wall")
    }
    return Measurement(model, batch_size, image_size, rounds, codec, **figures, **ratios)


def _ratio(compressed: float, stock: float) -> float:
    return compressed / stock if stock > 0 else math.nan
