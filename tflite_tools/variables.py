"""Variables within one function: read once, before anything else, and written once, at its end."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import tensorflow as tf

#: Operations that take a variable and leave it as it is.
READS = frozenset(("ReadVariableOp", "ResourceGather", "VariableShape"))
# One does not look into the variable, of the others the rule says why they are not supported.
_LEFT_TO_RULES = {"VariableShape", "PartitionedCall", "StatefulPartitionedCall"}
_CHANGES = {
    "AssignAddVariableOp": operator.add,
    "AssignSubVariableOp": operator.sub,
    "ResourceScatterAdd": operator.add,
    "ResourceScatterSub": operator.sub,
}


class Variables:
    """The values of a function's variables at the operation that is being written.

    TensorFlow Lite plans memory up to the next operation whose output's shape it cannot know, which
    a read of a variable counts as; only when that has run it plans on, and what it planned before
    stays where it is. So a read in the middle of a step is answered with what was assigned.
    """

    def __init__(self) -> None:
        self._values: dict[int, tf.Tensor] = {}
        self._assigned: dict[int, tf.Tensor] = {}

    def emit(self, op: tf.Operation, inputs: Sequence[tf.Tensor]) -> Sequence[tf.Tensor] | None:
        """The outputs of `op`, if it takes a variable; else None.

        Raises:
            NotImplementedError: If it does something else with it.
        """
        takes_none = not any(x is not None and x.dtype == tf.resource for x in inputs)
        if takes_none or op.type in _LEFT_TO_RULES:
            return None
        if op.type == "ReadVariableOp":
            return [self._read(inputs[0], op.get_attr("dtype"))]
        if op.type == "ResourceGather" and not op.get_attr("batch_dims"):
            return [tf.gather(self._read(inputs[0], op.get_attr("dtype")), inputs[1])]
        handle, *operands = inputs
        if op.type == "AssignVariableOp":
            value = operands[0]
        elif op.type in _CHANGES:
            before = self._read(handle, operands[-1].dtype)
            change = _scattered(before, *operands) if "Scatter" in op.type else operands[0]
            value = _CHANGES[op.type](before, change)
        else:
            raise NotImplementedError(
                "a variable that is used in a branch or a loop, as recurrent layers without "
                "unroll=True and accumulated gradients have it"
            )
        self._values[id(handle)] = value
        self._assigned[id(handle)] = handle
        return []

    def write(self) -> None:
        """Assign what has changed."""
        for key, handle in self._assigned.items():
            tf.raw_ops.AssignVariableOp(resource=handle, value=self._values[key])

    def _read(self, handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        if id(handle) not in self._values:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            self._values[id(handle)] = value
        return self._values[id(handle)]


def _scattered(like: tf.Tensor, indices: tf.Tensor, updates: tf.Tensor) -> tf.Tensor:
    """Rows of updates where the indices say, zeros elsewhere; those of one row are summed."""
    rows, *rest = like.shape
    updates = tf.reshape(updates, [-1, *rest])
    return tf.scatter_nd(tf.reshape(indices, [-1, 1]), updates, [rows, *rest])
