"""What an operator of a `.tflite` takes, roughly: for comparing one with another."""

from __future__ import annotations

import math

from tflite_tools import flatbuffer as fb
from tflite_tools.graph import STATE, Graph

# Of a small processor's one core; only their ratios count.
_FLOPS, _BYTES = 25e9, 8e9
_CALL = 5e-6

_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL")
# Times that a multiplication takes in kernels which reach a fraction of what convolutions do.
_SLOWER = {"DEPTHWISE_CONV_2D": 4}
# Those that run subgraphs, which may do anything.
_IMPURE = STATE | {"CALL", "IF", "WHILE"}


def is_pure(graph: Graph, i: int) -> bool:
    """Whether an operator makes the same of the same, and nothing else."""
    tensors = graph.model.subgraphs[graph.number].tensors
    if any(tensors[t].isVariable for t in graph.inputs[i]):
        return False  # an operator's own state
    return graph.names[i] not in _IMPURE and not fb.is_custom(graph.model, graph.operator(i))


def seconds(graph: Graph, i: int) -> float:
    """The time an operator takes: what it multiplies, and what it moves."""
    moved = sum(graph.sizes[t] for t in (*graph.inputs[i], *graph.outputs[i]))
    multiplied = 0
    if graph.names[i] in _PRODUCTS:
        multiplied = _SLOWER.get(graph.names[i], 1) * _elements(graph, graph.outputs[i][0])
        multiplied *= terms(graph, i)
    return _CALL + moved / _BYTES + 2 * multiplied / _FLOPS


def terms(graph: Graph, i: int) -> int:
    """How many terms an operator sums up for each element that it makes."""
    name = graph.names[i]
    if name in ("SUM", "MEAN"):
        made = _elements(graph, graph.outputs[i][0])
        return _elements(graph, graph.inputs[i][0]) // max(made, 1)
    if name not in _PRODUCTS:
        return 1
    x, kernel = (_shape(graph, t) for t in graph.inputs[i][:2])
    if name == "CONV_2D":
        return math.prod(kernel[1:])
    if name == "DEPTHWISE_CONV_2D":
        return math.prod(kernel[1:3])
    if name == "BATCH_MATMUL" and graph.operator(i).builtinOptions.adjX:
        return x[-2]
    return x[-1]


def _elements(graph: Graph, t: int) -> int:
    return math.prod(_shape(graph, t))


def _shape(graph: Graph, t: int) -> list[int]:
    return fb.listed(graph.model.subgraphs[graph.number].tensors[t].shape)
