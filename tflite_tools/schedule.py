"""Put the operators of a `.tflite` file in the order that needs least memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from ai_edge_litert import schema_py_generated as schema

from tflite_tools import control, orders
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
    overwrite: bool = False,
) -> list[Scheduled]:
    """Write the model in `source` to `destination`, in an order of low peak memory.

    Any `.tflite` will do. Reads and writes of variables stay in order, and no subgraph comes out
    with a higher peak than it had. The order holds under delegates, too.

    Args:
        source: A `.tflite` file.
        destination: Where to write the other one; may be `source`, with `overwrite`.
        overwrite: Whether to replace what is there.

    Returns:
        Peaks before and after of each subgraph, in bytes.

    Raises:
        FileFormatError: If `source` is not a whole `.tflite` file.
        FileExistsError: If `destination` exists and `overwrite` is False.
    """
    refuse_to_overwrite(pathlib.Path(destination), overwrite)
    model = fb.read(source)
    scheduled = arrange(model)
    fb.write(model, destination, overwrite=overwrite)
    return scheduled


def arrange(model: schema.ModelT) -> list[Scheduled]:
    """`schedule` of a model in memory, which is changed."""
    scheduled = []
    for number, subgraph in enumerate(model.subgraphs):
        graph = Graph(model, number)
        order = orders.lowest(graph)
        subgraph.operators = [subgraph.operators[i] for i in order]
        scheduled.append(
            Scheduled(
                fb.text(subgraph.name) or str(number),
                len(graph),
                graph.peak().nbytes,
                graph.peak(order).nbytes,
            )
        )
    control.chain(model)
    return scheduled
