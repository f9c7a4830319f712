"""What an operator of a `.tflite` takes, roughly: for comparing one with another."""

from __future__ import annotations

import math

from tflite_tools import flatbuffer as fb
from tflite_tools.graph import Graph

# Of a small processor's one core; only their ratios count.
_FLOPS, _BYTES = 25e9, 8e9
_CALL = 5e-6

_IMPURE = {
    *("VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE", "CALL_ONCE", "CALL", "IF", "WHILE"),
    *("RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL"),
    *("HASHTABLE", "HASHTABLE_FIND", "HASHTABLE_IMPORT", "HASHTABLE_SIZE"),
    *("UNIDIRECTIONAL_SEQUENCE_LSTM", "LSTM", "SVDF", "RNN", "UNIDIRECTIONAL_SEQUENCE_RNN"),
}


def is_pure(graph: Graph, i: int) -> bool:
    """Whether an operator makes the same of the same, and nothing else."""
    op = graph.model.subgraphs[graph.number].operators[i]
    return graph.names[i] not in _IMPURE and not fb.is_custom(graph.model, op)


def seconds(graph: Graph, i: int) -> float:
    """The time an operator takes: what it multiplies, and what it moves."""
    moved = sum(graph.sizes[t] for t in (*graph.inputs[i], *graph.outputs[i]))
    return _CALL + moved / _BYTES + 2 * _multiplications(graph, i) / _FLOPS


def _multiplications(graph: Graph, i: int) -> int:
    name = graph.names[i]
    subgraph = graph.model.subgraphs[graph.number]

    def shape(t: int) -> list[int]:
        return fb.listed(subgraph.tensors[t].shape)

    if name not in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL"):
        return 0
    made = math.prod(shape(graph.outputs[i][0]))
    x, kernel = (shape(t) for t in graph.inputs[i][:2])
    if name == "CONV_2D":
        return made * math.prod(kernel[1:])
    if name == "DEPTHWISE_CONV_2D":
        # Its kernels reach a fraction of what those of convolutions do.
        return 4 * made * math.prod(kernel[1:3])
    return made * x[-1]
