"""How long operations take: a model of floating-point operations and bytes.

An operation takes the time to read its inputs and write its outputs, and a product that
of its floating-point operations besides. The three rates are measured once a process.
That is good for comparing plans, not for predicting a step: what TensorFlow fuses, and
what stays in caches, it does not know.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from bittrain_tf.analysis.graph import VIEWS
from bittrain_tf.analysis.liveness import Densities, tensor_bytes

_FREE = VIEWS | {"Const", "NoOp", "Placeholder", "ReadVariableOp", "Shape", "VarHandleOp"}
_REPEATS = 3


class Rates(NamedTuple):
    """What this machine does in a second.

    Attributes:
        product: Floating-point operations of a convolution or matrix product.
        depthwise: Floating-point operations of a depthwise convolution.
        memory: Bytes read and written by an elementwise operation.
    """

    product: float
    depthwise: float
    memory: float


def operations_seconds(operations: Iterable[tf.Operation], densities: Densities) -> float:
    """Seconds that operations take, one after the other, all cores working on each.

    Args:
        operations: Operations of known shapes.
        densities: The densities of what is encoded.
    """
    rates = measured_rates()
    return math.fsum(_seconds(op, rates, densities) for op in operations)


def is_product(op: tf.Operation) -> bool:
    """Whether an operation is a convolution or a matrix product, or a gradient of one."""
    return _flops(op) > 0


@functools.cache
def measured_rates() -> Rates:
    """The rates of this machine, measured in a fraction of a second."""
    image, kernel = tf.ones([8, 32, 32, 64]), tf.ones([3, 3, 64, 64])
    depthwise_kernel, large = tf.ones([3, 3, 64, 1]), tf.ones([2**22])
    strides = [1, 1, 1, 1]
    return Rates(
        product=2 * image.shape.num_elements() * 9 * 64
        / _time(lambda: tf.nn.conv2d(image, kernel, strides, "SAME")),
        depthwise=2 * image.shape.num_elements() * 9
        / _time(lambda: tf.nn.depthwise_conv2d(image, depthwise_kernel, strides, "SAME")),
        memory=2 * 4 * large.shape.num_elements() / _time(lambda: tf.nn.relu(large)),
    )  # fmt: skip


def _time(fn: Callable[[], tf.Tensor]) -> float:
    with tf.init_scope():  # really run, also when called while a graph is written
        fn()
        seconds = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            fn()
            seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _seconds(op: tf.Operation, rates: Rates, densities: Densities) -> float:
    if op.type in _FREE:
        return 0.0
    rate = rates.depthwise if op.type.startswith("Depthwise") else rates.product
    moved = sum(tensor_bytes(t, densities) for t in [*op.inputs, *op.outputs])
    return _flops(op) / rate + moved / rates.memory


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
