"""What a `.tflite` takes in memory, and when."""

from __future__ import annotations

import collections
import dataclasses
import os

from bittrain_tf.analysis import plots
from bittrain_tf.analysis.text import size_text, table, to_text
from tflite_tools import flatbuffer as fb
from tflite_tools import orders
from tflite_tools.graph import Graph

_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: Its name.
        shape: Its shape, -1 where a size is not known before a run.
        dtype: The type of its elements.
        nbytes: Its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Inspected:
    """One signature of a file, or a subgraph that none leads to.

    Attributes:
        name: The signature's, or the subgraph's.
        operators: How many there are of each kind, the most frequent first.
        custom: Those that are not builtin operators of TensorFlow Lite.
        held: Live bytes while each operator runs, in the order of the file.
        held_scheduled: The same in the order that `schedule` would give it.
        at: The operator at the peak: its number and name.
        alive: The tensors alive at the peak, the largest first.
    """

    name: str
    operators: dict[str, int]
    custom: tuple[str, ...]
    held: tuple[int, ...]
    held_scheduled: tuple[int, ...]
    at: tuple[int, str]
    alive: tuple[Tensor, ...]

    @property
    def peak(self) -> int:
        """The most bytes that are live at once."""
        return max(self.held, default=0)

    @property
    def peak_scheduled(self) -> int:
        """The same after `schedule`."""
        return max(self.held_scheduled, default=0)

    def render(self) -> str:
        """Peak, what is alive then, and which operators there are, as text."""
        number, name = self.at
        title = (
            f"{self.name}: peak {size_text(self.peak)} at operator {number} of {len(self.held)} "
            f"({name}); scheduled {size_text(self.peak_scheduled)}"
        )
        rows = [
            (size_text(t.nbytes), t.dtype, "x".join(map(str, t.shape)), t.name)
            for t in self.alive[:_SHOWN]
        ]
        rest = self.alive[_SHOWN:]
        if rest:
            rows.append((size_text(sum(t.nbytes for t in rest)), "", "", f"{len(rest)} more"))
        alive = table(title, ("bytes", "dtype", "shape", "alive at the peak"), rows, ("bytes",))
        counts = ", ".join(f"{name} {count}" for name, count in self.operators.items())
        return to_text(alive, f"operators: {counts}\n")


def inspect(path: str | os.PathLike[str]) -> list[Inspected]:
    """What each signature of a `.tflite` takes, by its operators and their order.

    Of tensors whose sizes are only known in a run the unknown dimensions count as 1.

    Raises:
        FileFormatError: If `path` is not a whole `.tflite` file.
    """
    model = fb.read(path)
    signatures = {s.subgraphIndex: fb.text(s.signatureKey) for s in fb.listed(model.signatureDefs)}
    inspected = []
    for number, subgraph in enumerate(model.subgraphs):
        graph = Graph(model, number)
        peak = graph.peak()
        alive = [subgraph.tensors[t] for t in graph.alive(peak.position)] if len(graph) else []
        tensors = [
            Tensor(fb.text(t.name), tuple(fb.shape(t)), fb.dtype(t), fb.nbytes(t)) for t in alive
        ]
        inspected.append(
            Inspected(
                signatures.get(number) or fb.text(subgraph.name) or str(number),
                dict(collections.Counter(graph.names).most_common()),
                tuple(sorted(fb.custom_names(model, subgraph))),
                tuple(graph.held(range(len(graph)))),
                tuple(graph.held(orders.lowest(graph))),
                (peak.position, graph.names[peak.position] if len(graph) else ""),
                tuple(sorted(tensors, key=lambda t: -t.nbytes)),
            )
        )
    return inspected


def plot(inspected: Inspected, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Draw live bytes over the operators, in the file's order and scheduled.

    Raises:
        ImportError: If matplotlib is not installed.
        FileExistsError: If `path` exists and `overwrite` is False.
        ValueError: If its ending is of no known format.
    """
    orders_held = {"as it is": inspected.held, "scheduled": inspected.held_scheduled}
    plots.save_steps(
        path,
        f"{inspected.name}: live bytes while each operator runs",
        ("operator", "MB"),
        {name: [nbytes / 1e6 for nbytes in held] for name, held in orders_held.items()},
        overwrite=overwrite,
    )
