"""Put the operators of a `.tflite` file in the order that needs least memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from ai_edge_litert import schema_py_generated as schema

from tflite_tools import control, orders, rebuilding
from tflite_tools import flatbuffer as fb
from tflite_tools.files import refuse_to_overwrite
from tflite_tools.graph import Graph


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """What came of scheduling one subgraph.

    Attributes:
        subgraph: Its name.
        operators: How many it has.
        before: Its peak of live bytes in the order it had.
        after: In the order it has now.
    """

    subgraph: str
    operators: int
    before: int
    after: int


def schedule(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    time_budget: float = 1.0,
    overwrite: bool = False,
) -> list[Scheduled]:
    """Write the model in `source` to `destination`, in an order of low peak memory.

    Any `.tflite` will do. Reads and writes of variables stay in order, and no subgraph comes out
    with a higher peak than it had. The order holds under delegates, too.

    Args:
        source: A `.tflite` file.
        destination: Where to write the other one; may be `source`, with `overwrite`.
        time_budget: How long a run may take, as a ratio to what it takes now, by an estimate.
            Beyond 1, tensors that would be kept for long are made again where they are needed.
        overwrite: Whether to replace what is there.

    Returns:
        Peaks before and after of each subgraph, in bytes.

    Raises:
        FileFormatError: If `source` is not a whole `.tflite` file.
        FileExistsError: If `destination` exists and `overwrite` is False.
        ValueError: If `time_budget` is below 1.
    """
    check_time_budget(time_budget)
    refuse_to_overwrite(pathlib.Path(destination), overwrite)
    model = fb.read(source)
    scheduled = arrange(model, time_budget)
    fb.write(model, destination, overwrite=overwrite)
    return scheduled


def check_time_budget(time_budget: float) -> None:
    """Raise ValueError if it is not one."""
    if not time_budget >= 1:
        raise ValueError(
            f"time_budget must be a ratio from 1 (nothing is made again), not {time_budget!r}."
        )


def arrange(model: schema.ModelT, time_budget: float = 1.0) -> list[Scheduled]:
    """`schedule` of a model in memory, which is changed."""
    scheduled = []
    for number, subgraph in enumerate(model.subgraphs):
        before = Graph(model, number)
        _reorder(model, number)
        if time_budget > 1:
            rebuilding.rebuild(model, number, time_budget)
            _reorder(model, number)
        after = Graph(model, number)
        scheduled.append(
            Scheduled(
                fb.text(subgraph.name) or str(number),
                len(after),
                before.peak().nbytes,
                after.peak().nbytes,
            )
        )
    control.chain(model)
    return scheduled


def _reorder(model: schema.ModelT, number: int) -> None:
    subgraph = model.subgraphs[number]
    order = orders.lowest(Graph(model, number))
    subgraph.operators = [subgraph.operators[i] for i in order]
