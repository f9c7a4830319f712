"""Reading from the graph of a training step which tensors its backward pass keeps.

TensorFlow runs an operation as soon as its inputs are there and frees a tensor
when its last reader has run. So what is kept from the forward pass to the
backward pass is what operations that wait for the gradient of the loss read from
operations that do not. Who created an operation does not matter: a decoder built
by the backward pass but not tied to the gradient runs in the forward pass, and
what it decodes is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

# The output is the first input under another shape or type, in the same memory.
VIEWS = frozenset(
    (
        "Bitcast",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
    )
)
_SHAPE_ONLY = frozenset(("Rank", "Shape", "ShapeN", "Size", "VariableShape"))
_SHAPE_ONLY_IF_STATIC = frozenset(("OnesLike", "ZerosLike"))
_CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))

Key = tuple[str, int]


def key(tensor: tf.Tensor) -> Key:
    """A hashable name of a graph tensor (graph tensors themselves are not hashable)."""
    return tensor.op.name, tensor.value_index


class StepGraph:
    """The graph of one training step.

    Args:
        graph: The graph, complete with its gradients.
        data: The placeholders of the batch.
        seed: The gradient of the loss that the backward pass starts from.
        gradients: The gradients asked for; what they do not need does not run.
    """

    def __init__(
        self,
        graph: tf.Graph,
        data: Sequence[tf.Tensor],
        seed: tf.Tensor,
        gradients: Sequence[tf.Tensor],
    ) -> None:
        self._graph = graph
        self._passed_through: dict[str, list[int | None]] | None = None
        operations = graph.get_operations()
        random = [op for op in operations if "Random" in op.type]
        self._from_data = _reach([t.op for t in data] + random, _data_readers)
        followers = defaultdict(list)
        for op in operations:
            for before in op.control_inputs:
                followers[before.name].append(op)
        self._live = _reach([t.op for t in gradients], _needs)
        self._backward = self._live & _reach(
            [seed.op], lambda op: [*_readers(op), *followers[op.name]]
        )

    def kept(self) -> list[tuple[tf.Tensor, list[tf.Operation]]]:
        """The tensors kept and, for each, the backward operations that read it.

        Weights, constants and what is computed from them alone are left out; a view
        counts as the tensor it is a view of.
        """
        tensors: dict[Key, tf.Tensor] = {}
        holders: dict[Key, dict[str, tf.Operation]] = defaultdict(dict)
        for op in self._graph.get_operations():
            if op.name not in self._backward or _needs_shape_only(op):
                continue
            for index, tensor in enumerate(op.inputs):
                original = self._original(tensor)
                if (
                    tensor.op.name in self._backward
                    or original.op.name not in self._from_data
                    or original.dtype == tf.resource
                ):
                    continue
                tensors[key(original)] = original
                for holder in self._final_readers(op, index):
                    holders[key(original)][holder.name] = holder
        return [(tensor, _without_copies(holders[k].values())) for k, tensor in tensors.items()]

    def list_element_dtype(self, handle: tf.Tensor) -> tf.DType | None:
        """The dtype of the elements of a tensor list (what a loop keeps of its steps).

        None if it is not known.
        """
        while handle.op.type in ("While", "StatelessWhile"):
            handle = self._original(handle.op.inputs[handle.value_index])
        if handle.op.type in ("EmptyTensorList", "TensorListReserve"):
            return handle.op.get_attr("element_dtype")
        return None

    def _original(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that `tensor` is a view of; itself if of none."""
        while True:
            source = self._source_index(tensor)
            if source is None:
                return tensor
            tensor = tensor.op.inputs[source]

    def _source_index(self, tensor: tf.Tensor) -> int | None:
        op = tensor.op
        if op.type == "IdentityN":
            return tensor.value_index
        if op.type in VIEWS:
            return 0
        if op.type in _CALLS:
            return self._arguments_returned(op.get_attr("f").name)[tensor.value_index]
        return None

    def _arguments_returned(self, function: str) -> list[int | None]:
        """For each output of a function the argument that it returns as it is, if it does."""
        if self._passed_through is None:
            library = self._graph.as_graph_def().library.function
            self._passed_through = {f.signature.name: _arguments_returned(f) for f in library}
        return self._passed_through[function]

    def _final_readers(self, op: tf.Operation, index: int) -> list[tf.Operation]:
        """Who reads input `index` of `op` in the end: views are followed, if anyone reads them."""
        if op.type == "IdentityN":
            output = op.outputs[index]
        elif op.type in VIEWS:
            output = op.outputs[0]
        else:
            return [op]
        found = [
            holder
            for reader in output.consumers()
            if reader.name in self._live and not _needs_shape_only(reader)
            for i, tensor in enumerate(reader.inputs)
            if key(tensor) == key(output)
            for holder in self._final_readers(reader, i)
        ]
        return found or [op]


def needed(graph: tf.Graph, outputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The operations that computing `outputs` takes, in the order they were written."""
    names = _reach([t.op for t in outputs], _needs)
    return [op for op in graph.get_operations() if op.name in names]


def _reach(
    start: Iterable[tf.Operation], onward: Callable[[tf.Operation], Iterable[tf.Operation]]
) -> set[str]:
    """The names of all operations reached from `start`, which is included."""
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        op = waiting.pop()
        if op.name not in reached:
            reached.add(op.name)
            waiting += onward(op)
    return reached


def _without_copies(holders: Iterable[tf.Operation]) -> list[tf.Operation]:
    """`holders` without those that only pass on what they read, unless there are no others."""
    holders = list(holders)
    return [op for op in holders if op.type not in VIEWS] or holders


def _needs(op: tf.Operation) -> list[tf.Operation]:
    return [*(t.op for t in op.inputs), *op.control_inputs]


def _readers(op: tf.Operation) -> list[tf.Operation]:
    return [reader for t in op.outputs for reader in t.consumers()]


def _data_readers(op: tf.Operation) -> list[tf.Operation]:
    return [reader for reader in _readers(op) if not _needs_shape_only(reader)]


def _needs_shape_only(op: tf.Operation) -> bool:
    return op.type in _SHAPE_ONLY or (
        # TensorFlow replaces these by constants.
        op.type in _SHAPE_ONLY_IF_STATIC and op.inputs[0].shape.is_fully_defined()
    )


def _arguments_returned(function: object) -> list[int | None]:
    """See `StepGraph._arguments_returned`; `function` is a `FunctionDef`."""
    arguments = {arg.name: i for i, arg in enumerate(function.signature.input_arg)}
    copies = {
        f"{node.name}:output:0": node.input[0]
        for node in function.node_def
        if node.op == "Identity"
    }

    def argument(name: str) -> int | None:
        while name in copies:
            name = copies[name]
        return arguments.get(name)

    return [argument(function.ret[out.name]) for out in function.signature.output_arg]
