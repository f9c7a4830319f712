"""Variables within one function: read once, before anything else, and written once, at its end."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

ASSIGNMENTS = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"))


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
        """The outputs of `op`, if it reads or assigns; else None."""
        if op.type == "ReadVariableOp":
            return [self._read(inputs[0], op.get_attr("dtype"))]
        if op.type == "ResourceGather" and not op.get_attr("batch_dims"):
            return [tf.gather(self._read(inputs[0], op.get_attr("dtype")), inputs[1])]
        if op.type not in ASSIGNMENTS:
            return None
        handle, value = inputs
        if op.type != "AssignVariableOp":
            before = self._read(handle, value.dtype)
            value = before + value if op.type == "AssignAddVariableOp" else before - value
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
