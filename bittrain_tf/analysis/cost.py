"""How long operations take: a model of floating-point operations and bytes.

An operation takes the time to read its inputs and write its outputs, and a product that
of its floating-point operations besides. The rates are constants, so that a plan is the
same wherever and whenever it is made. That is good for comparing plans, not for
predicting a step: what TensorFlow fuses, and what stays in caches, it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import tensorflow as tf

from bittrain_tf.analysis.graph import VIEWS
from bittrain_tf.analysis.liveness import Densities, tensor_bytes

_FREE = VIEWS | {"Const", "NoOp", "Placeholder", "ReadVariableOp", "Shape", "VarHandleOp"}
# Measured on two cores of a Xeon with AVX-512, float32; only their ratios matter. A
# convolution or matrix product, in floating-point operations a second; a depthwise one,
# likewise; an elementwise operation, in bytes read and written a second.
_PRODUCT, _DEPTHWISE, MEMORY = 2.0e11, 1.4e10, 2.5e10


def operations_seconds(operations: Iterable[tf.Operation], densities: Densities) -> float:
    """Seconds that operations take, one after the other, all cores working on each.

    Args:
        operations: Operations of known shapes.
        densities: The densities of what is encoded.
    """
    return math.fsum(_seconds(op, densities) for op in operations)


def is_product(op: tf.Operation) -> bool:
    """Whether an operation is a convolution or a matrix product, or a gradient of one."""
    return _flops(op) > 0


def _seconds(op: tf.Operation, densities: Densities) -> float:
    if op.type in _FREE:
        return 0.0
    rate = _DEPTHWISE if op.type.startswith("Depthwise") else _PRODUCT
    moved = sum(tensor_bytes(t, densities) for t in [*op.inputs, *op.outputs])
    return _flops(op) / rate + moved / MEMORY


def _flops(op: tf.Operation) -> float:
    """Floating-point operations of a product, 0 for anything else."""
    kind = op.type
    if kind.startswith(("Conv2D", "Conv3D", "DepthwiseConv2dNative")):
        # Every element of the output, or of its gradient, meets as many of the input as the
        # kernel has in front of its last axis (depthwise: its window).
        if kind.endswith(("BackpropFilter", "BackpropFilterV2")):
            kernel, output = op.outputs[0].shape, op.inputs[2]
        elif kind.endswith(("BackpropInput", "BackpropInputV2")):
            kernel, output = op.inputs[1].shape, op.inputs[2]
        else:
            kernel, output = op.inputs[1].shape, op.outputs[0]
        met = kernel[:-2] if kind.startswith("Depthwise") else kernel[:-1]
        return 2.0 * _elements(output) * (met.num_elements() or 0)
    if kind == "MatMul":
        contracted = op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
        return 2.0 * _elements(op.outputs[0]) * (contracted or 0)
    if kind in ("BatchMatMul", "BatchMatMulV2"):
        contracted = op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
        return 2.0 * _elements(op.outputs[0]) * (contracted or 0)
    if kind == "Einsum":
        return 2.0 * math.prod(_einsum_lengths(op))
    return 0.0


def _einsum_lengths(op: tf.Operation) -> list[int]:
    equation = op.get_attr("equation").decode()
    lengths: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), op.inputs, strict=True):
        letters = labels.replace("...", "")
        if tensor.shape.rank is None:
            return [0]
        dims = tensor.shape.as_list()
        lengths |= zip(letters, dims[len(dims) - len(letters) :], strict=True)
        rest = math.prod(d or 0 for d in dims[: len(dims) - len(letters)])
        lengths["..."] = max(lengths.get("...", 1), rest)
    return [length or 0 for length in lengths.values()]


def _elements(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() or 0
