"""Random numbers."""

from __future__ import annotations

import tensorflow as tf

from tflite_tools.rules.registry import register, static_shape

_UNIFORM = ("StatelessRandomUniformV2", "StatelessRandomUniform")
_NORMAL = ("StatelessRandomNormalV2", "StatelessRandomNormal")
#: Operations whose inputs nobody needs here.
TYPES = frozenset((*_UNIFORM, *_NORMAL))


@register(*_UNIFORM)
def uniform(op: tf.Operation, *inputs: tf.Tensor) -> tf.Tensor:
    """New numbers in each step: of the interpreter's own generator, not those of Keras's seeds."""
    return tf.random.uniform(static_shape(op.outputs[0]), dtype=op.outputs[0].dtype)


@register(*_NORMAL)
def normal(op: tf.Operation, *inputs: tf.Tensor) -> tf.Tensor:
    """As `uniform`."""
    return tf.random.normal(static_shape(op.outputs[0]), dtype=op.outputs[0].dtype)
