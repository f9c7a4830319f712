"""The live bytes of a traced step, by playing its operations through.

Twice, and the larger figure is taken: in the order they were written, and in the order
that TensorFlow's executor takes on one thread (see `_executed`). A tensor is freed when
its last reader has run, and an elementwise operation writes over an input nobody else
reads, as TensorFlow does. What is asked for, the gradients of weights, is taken to be
consumed as soon as it is there, by an update that takes as much again, as plain SGD does.
Weights and the batch are not counted. Nor is what kernels allocate inside, but for a
product's packed operand.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

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
# What TensorFlow comes to take for inexpensive: done in some thousand cycles.
_SMALL_BYTES = 2**14
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
    """The bytes alive at each of the operations that computing `outputs` takes, in order.

    Args:
        graph: The graph, its shapes known but for the lengths of encoded values.
        outputs: What is asked for.
        densities: The densities of what is encoded.
    """
    written = needed(graph, outputs)
    most: dict[str, int] = {}
    for order in (written, _executed(written, densities)):
        operations = [op for op in order if not _is_view(op)]
        buffers = _Buffers(operations, outputs, densities)
        for op in operations:
            most[op.name] = max(most.get(op.name, 0), buffers.run(op))
    return [(op, most[op.name]) for op in written if op.name in most]


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
    while _is_view(tensor.op):
        op, index = tensor.op, 0
        if op.type == "IdentityN":
            index = tensor.value_index
        elif op.type == "Mul":
            index = int(_is_one(op.inputs[0]))
        tensor = op.inputs[index]
    return tensor


def _is_view(op: tf.Operation) -> bool:
    """Whether an operation passes on what it reads; a product with 1 is optimized away."""
    return op.type in VIEWS or (op.type == "Mul" and any(map(_is_one, op.inputs)))


def _is_one(tensor: tf.Tensor) -> bool:
    if tensor.op.type != "Const" or tensor.shape.rank != 0 or not tensor.dtype.is_floating:
        return False
    return tf.get_static_value(tensor) == 1


def _executed(operations: Sequence[tf.Operation], densities: Densities) -> Iterator[tf.Operation]:
    """`operations` in the order of TensorFlow's executor on one thread.

    Of those that have become ready, small ones are run next, in turn; of the others, the
    last one is run next and the rest are put in front of all that wait (tensorflow/core/
    common_runtime/executor.cc, `ScheduleReady`, on a thread pool that takes the youngest).
    """
    names = {op.name for op in operations}
    missing: dict[str, int] = {}
    readers: dict[str, list[tf.Operation]] = defaultdict(list)
    for op in operations:
        before = {o.name for o in (*(t.op for t in op.inputs), *op.control_inputs)} & names
        missing[op.name] = len(before)
        for name in before:
            readers[name].append(op)
    next_up = deque(op for op in operations if not missing[op.name])
    waiting: deque[tf.Operation] = deque()
    while next_up or waiting:
        op = next_up.popleft() if next_up else waiting.popleft()
        yield op
        last = None
        for reader in readers[op.name]:
            missing[reader.name] -= 1
            if missing[reader.name]:
                continue
            if sum(tensor_bytes(t, densities) for t in reader.outputs) < _SMALL_BYTES:
                next_up.append(reader)
                continue
            if last is not None:
                waiting.appendleft(last)
            last = reader
        if last is not None:
            (waiting.appendleft if next_up else next_up.append)(last)


class _Buffers:
    """What is alive."""

    def __init__(
        self,
        operations: Sequence[tf.Operation],
        outputs: Sequence[tf.Tensor],
        densities: Densities,
    ) -> None:
        self._consumed = {key(original(t)) for t in outputs}
        self._densities = densities
        self._readers = Counter(key(original(t)) for op in operations for t in op.inputs)
        # Of what is read before it is written, as a loop's accumulators are: nothing.
        self._sizes: defaultdict[Key, int] = defaultdict(int)
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
        updates = (t for t in op.outputs if key(t) in self._consumed)
        inside = max(inside, sum(tensor_bytes(t, self._densities) for t in updates))
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
