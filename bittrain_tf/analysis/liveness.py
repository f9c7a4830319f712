"""The live bytes of a traced step, by playing its operations through.

In the order they were written, as an executor with little to run at once would; a
tensor is freed when its last reader has run, and an elementwise operation writes over
an input nobody else reads, as TensorFlow does. A weight's gradient is taken to be
consumed as soon as it is there, as plain SGD does. Weights and the batch are not
counted. Nor is what kernels allocate inside, but for a product's packed operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import tensorflow as tf

from bittrain_tf.analysis.graph import VIEWS, Key, key, needed

_IN_PLACE = frozenset(
    (
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Bittrain>Choose",
        "Bittrain>Multiply",
        "Erf",
        "Exp",
        "Maximum",
        "Minimum",
        "Mul",
        "Neg",
        "Pow",
        "RealDiv",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Rsqrt",
        "SelectV2",
        "Sigmoid",
        "SigmoidGrad",
        "Softmax",
        "Sqrt",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
    )
)
_THERE_ANYWAY = frozenset(("Const", "Placeholder", "ReadVariableOp", "VarHandleOp"))
# The kernel of these reorders its inputs first.
_REORDERING = frozenset(("BatchMatMulV2", "Einsum"))


class Densities:
    """The share of values that are not zero, for the lengths of what is encoded.

    Args:
        default: Where it is not known.
        known: By the name of the operation that makes a tensor.
    """

    def __init__(self, default: float, known: Mapping[str, float] | None = None) -> None:
        self._default, self._known = default, known or {}

    def of(self, tensor: tf.Tensor) -> float:
        """That of a tensor."""
        return self._known.get(original(tensor).op.name, self._default)


def live_bytes(
    graph: tf.Graph, outputs: Sequence[tf.Tensor], densities: Densities
) -> list[tuple[tf.Operation, int]]:
    """The bytes alive at each of the operations that computing `outputs` takes.

    Args:
        graph: The graph, its shapes known but for the lengths of encoded values.
        outputs: What is asked for.
        densities: The densities of what is encoded.
    """
    operations = [op for op in needed(graph, outputs) if op.type not in VIEWS]
    buffers = _Buffers(operations, densities)
    return [(op, buffers.run(op)) for op in operations]


def peak_live_bytes(graph: tf.Graph, outputs: Sequence[tf.Tensor], densities: Densities) -> int:
    """The most bytes alive at a time; see `live_bytes`."""
    return max((nbytes for _, nbytes in live_bytes(graph, outputs, densities)), default=0)


def tensor_bytes(tensor: tf.Tensor, densities: Densities) -> int:
    """Bytes of a tensor; one of unknown length holds the values of the largest it is made from."""
    if not tensor.dtype.size or tensor.dtype in (tf.resource, tf.variant):
        return 0
    elements = tensor.shape.num_elements()
    if elements is None:
        read = [t for t in tensor.op.inputs if t.dtype.is_floating and t.shape.num_elements()]
        if not read:
            return 0
        largest = max(read, key=lambda t: t.shape.num_elements())
        elements = densities.of(largest) * largest.shape.num_elements()
    return int(elements * tensor.dtype.size)


def original(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that `tensor` is a view of."""
    while tensor.op.type in VIEWS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


class _Buffers:
    """What is alive."""

    def __init__(self, operations: Sequence[tf.Operation], densities: Densities) -> None:
        self._densities = densities
        self._readers = Counter(key(original(t)) for op in operations for t in op.inputs)
        self._sizes: dict[Key, int] = {}
        self._written_over: dict[Key, Key] = {}
        self._live = 0

    def run(self, op: tf.Operation) -> int:
        """Run an operation; returns the bytes alive meanwhile."""
        inputs = [self._buffer(key(original(t))) for t in op.inputs]
        for output in op.outputs:
            nbytes = 0 if op.type in _THERE_ANYWAY else tensor_bytes(output, self._densities)
            reused = self._reusable(op, inputs, nbytes)
            if reused is not None and output.value_index == 0:
                self._written_over[key(output)] = reused
                self._readers[reused] += self._readers[key(output)]
            else:
                self._sizes[key(output)] = nbytes
                self._live += nbytes
        inside = sum(self._sizes[b] for b in inputs) if op.type in _REORDERING else 0
        meanwhile = self._live + inside
        for buffer in inputs:
            self._readers[buffer] -= 1
        for buffer in {*inputs, *(self._buffer(key(t)) for t in op.outputs)}:
            if not self._readers[buffer]:
                self._live -= self._sizes[buffer]
                self._sizes[buffer] = 0
        return meanwhile

    def _buffer(self, tensor: Key) -> Key:
        while tensor in self._written_over:
            tensor = self._written_over[tensor]
        return tensor

    def _reusable(self, op: tf.Operation, inputs: Sequence[Key], nbytes: int) -> Key | None:
        if op.type not in _IN_PLACE or not nbytes:
            return None
        for buffer in inputs:
            is_last_reader = self._readers[buffer] == inputs.count(buffer)
            if is_last_reader and self._sizes[buffer] == nbytes:
                return buffer
        return None
