"""A traced function, written again with operations that TensorFlow Lite has.

Keras traces the step as it trains on any machine, gradients, optimizer and all; here the graph is
copied, operation by operation, and those without a counterpart are put in other words
(see `rules`). So whatever Keras computes is what the device computes: there is no second
definition of a layer, a loss or an optimizer that could differ from the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tflite_tools.errors import UnsupportedError, layer_of
from tflite_tools.microbatches import Batched, Microbatches, Value, whole
from tflite_tools.rules import find, random
from tflite_tools.variables import READS, Variables

# What a trace holds for tapes and debuggers only.
_IDLE = {"NoOp", "Placeholder", "Assert"}


def lower(
    fn: Callable[..., dict[str, tf.Tensor]],
    specs: Sequence[tf.TensorSpec],
    ignored: Sequence[tf.Variable] = (),
    batched: int = 0,
    microbatches: int = 1,
) -> tf.types.experimental.PolymorphicFunction:
    """`fn` as a `tf.function` of operations that the converter takes, of fixed shapes.

    Args:
        fn: A function of tensors, which may read and assign variables; returns a dict.
        specs: Name, shape and dtype of each argument; every size known.
        ignored: Variables whose changes are not to be part of it.
        batched: How many of the first arguments have a sample a row.
        microbatches: Into how many of them to divide these.

    Raises:
        UnsupportedError: Naming the layer, if there is no way to say an operation.
    """
    with _inlined():
        try:
            traced = tf.function(fn, input_signature=specs, autograph=False).get_concrete_function()
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise UnsupportedError(
                "a branch or a loop that depends on data, in a tf.function", "the model"
            ) from error
    handles = {id(internal): external for external, internal in traced.graph.captures}
    dropped = {id(v.handle) for v in ignored}
    results = traced.structured_outputs

    operations = _needed(traced.graph, list(results.values()), handles, dropped)
    with_rows = {id(x) for x in traced.inputs[:batched]}
    division = Microbatches(microbatches, operations, with_rows)

    def lowered(*arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        values: dict[int, Value] = dict(handles)
        variables = Variables()

        def emit(
            op: tf.Operation, inputs: Sequence[tf.Tensor | None]
        ) -> Sequence[tf.Tensor | None]:
            try:
                outputs = variables.emit(op, inputs)
                return _emit(op, inputs) if outputs is None else outputs
            except NotImplementedError as error:
                raise UnsupportedError(f"{op.type} ({error})", layer_of(op.name)) from error

        for x, argument in zip(traced.inputs, arguments, strict=False):
            values[id(x)] = Batched(argument) if id(x) in with_rows else argument
        for op in operations:
            inputs = [values.get(id(x)) for x in op.inputs]
            for x, value in zip(op.outputs, division.emit(op, inputs, emit), strict=True):
                if tf.is_tensor(value) and value.dtype != tf.resource:
                    value.set_shape(x.shape)  # which the trace may know better
                values[id(x)] = value
        variables.write()
        return {name: whole(values[id(x)]) for name, x in results.items()}

    return tf.function(lowered, input_signature=specs, autograph=False)


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    """Functions that are compiled by themselves, such as convolutions in groups, become a part.

    By a switch for the whole process: one trace at a time.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # into the graph that is being traced
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _needed(
    graph: tf.Graph, results: Sequence[tf.Tensor], handles: dict[int, tf.Tensor], dropped: set[int]
) -> list[tf.Operation]:
    """The operations that results or variables depend on, in the order they were written."""

    def counts(op: tf.Operation) -> bool:
        taken = [handles[id(x)] for x in op.inputs if id(x) in handles and x.dtype == tf.resource]
        return op.type not in READS and any(id(handle) not in dropped for handle in taken)

    todo = [x.op for x in results] + [op for op in graph.get_operations() if counts(op)]
    seen: set[tf.Operation] = set()
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            # Random numbers come of the interpreter's own generator, whatever Keras seeded.
            todo += [] if op.type in random.TYPES else [x.op for x in op.inputs]
    return [op for op in graph.get_operations() if op in seen and op.type not in _IDLE]


def _emit(op: tf.Operation, inputs: list[tf.Tensor | None]) -> Sequence[tf.Tensor | None]:
    """The outputs of `op`, or of what stands in for it, written into the current graph."""
    rule = find(op.type)
    outputs = None
    if rule is not None:
        # The scope carries the name of the layer to what the converter may object to.
        with tf.name_scope(f"{op.name}/"):
            outputs = rule(op, *inputs)
    if outputs is not None:
        return [outputs] if tf.is_tensor(outputs) else outputs
    copy = tf.compat.v1.get_default_graph().create_op(
        op.type,
        inputs,
        [x.dtype for x in op.outputs],
        name=op.name,
        attrs=dict(op.node_def.attr),
    )
    return copy.outputs
