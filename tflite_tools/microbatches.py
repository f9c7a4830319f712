"""A step in microbatches: what is done to a batch, done to a few samples at a time.

Most operations of a training step treat each sample by itself, and so can be done to a few samples
and then to the next few: what they need for themselves shrinks, and where nothing couples the
samples (no batch normalization), one microbatch is trained before the next is begun, so that only
its activations are kept. What sums over the batch, gradients of weights most of all, sums over
microbatches. It is the same step, but for the order of those sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

# What they make depends on the shapes of their inputs only.
_OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}

Emit = Callable[[tf.Operation, Sequence["tf.Tensor | None"]], Sequence["tf.Tensor | None"]]

# A batch is divided into no more parts: each has operators of its own, which take room, too.
_MOST = 8
# Where samples are coupled, smaller tensors stay whole: dividing them saves less than it costs.
_LARGE = 1 << 19


def count(batch_size: int) -> int:
    """Into how many microbatches of equal size a batch is divided."""
    return max(n for n in range(1, _MOST + 1) if batch_size % n == 0)


class Batched:
    """A tensor that can be taken apart along its first dimension, and what there is of it so far.

    Args:
        whole: The tensor, or None.
        parts: Its equal parts, or None.
    """

    def __init__(
        self, whole: tf.Tensor | None = None, parts: Sequence[tf.Tensor] | None = None
    ) -> None:
        self._whole, self._parts = whole, parts

    def whole(self) -> tf.Tensor:
        """All of it."""
        if self._whole is None:
            self._whole = tf.concat(self._parts, 0)
        return self._whole

    def parts(self, count: int) -> Sequence[tf.Tensor]:
        """Its `count` parts, in order."""
        if self._parts is None:
            self._parts = _split(self._whole, count)
        return self._parts


def _split(x: tf.Tensor, count: int) -> Sequence[tf.Tensor]:
    """Equal parts; slices, where TensorFlow Lite has no operator to split the type."""
    if x.dtype in (tf.float32, tf.int32):
        return tf.split(x, count)
    rows = x.shape[0] // count
    return [x[k * rows : (k + 1) * rows] for k in range(count)]


Value = "tf.Tensor | Batched | None"


def whole(value: Value) -> tf.Tensor | None:
    """All of a value, which may be batched or not."""
    return value.whole() if isinstance(value, Batched) else value


@dataclasses.dataclass(frozen=True)
class Division:
    """How an operation is done in parts.

    Attributes:
        divided: Which inputs are taken apart; each part of the operation has the others whole.
        combine: What makes the output of the parts' outputs; None if they are its parts.
        emit: Writes one part, given the parts of the inputs and the number of parts; None if that
            is written as the whole is.
    """

    divided: list[bool]
    combine: Callable[[Sequence[tf.Tensor]], tf.Tensor] | None = None
    emit: Callable[[tf.Operation, Sequence[tf.Tensor], int], tf.Tensor] | None = None


class Microbatches:
    """How the operations of one function are divided.

    Args:
        count: Into how many parts.
        operations: Those of the function, in order.
        batched: The ids of the arguments that have a sample a row.
    """

    def __init__(self, count: int, operations: Iterable[tf.Operation], batched: set[int]) -> None:
        self.count = count
        self._least = _LARGE if count > 1 and self._coupled(operations, batched) else 0

    def emit(self, op: tf.Operation, inputs: Sequence[Value], emit: Emit) -> Sequence[Value]:
        """Write `op`, which `emit` writes if it is not divided.

        Returns:
            Its outputs: batched, if they can be taken apart.
        """
        if op.type in _OF_SHAPES:
            return emit(op, list(op.inputs))
        if op.type == "IdentityN":
            return list(inputs)
        division = self._division(op, [isinstance(x, Batched) for x in inputs])
        if division is None:
            return emit(op, [whole(x) for x in inputs])
        if max(map(_nbytes, (*op.inputs, *op.outputs))) < self._least:
            outputs = emit(op, [whole(x) for x in inputs])
            return outputs if division.combine else [Batched(x) for x in outputs]
        parts = self._parts(op, inputs, division, emit)
        each = list(zip(*parts, strict=True))
        if division.combine:
            return [division.combine(outputs) for outputs in each]
        return [Batched(parts=outputs) for outputs in each]

    def _parts(
        self, op: tf.Operation, inputs: Sequence[Value], division: Division, emit: Emit
    ) -> list[Sequence[tf.Tensor | None]]:
        columns = []
        for x, divided in zip(inputs, division.divided, strict=True):
            if divided:
                x = x if isinstance(x, Batched) else Batched(x)
                columns.append(x.parts(self.count))
            else:
                columns.append([whole(x)] * self.count)
        rows = list(zip(*columns, strict=True))
        if division.emit is None:
            return [emit(op, row) for row in rows]
        return [[division.emit(op, row, self.count)] for row in rows]

    def _division(self, op: tf.Operation, batched: Sequence[bool]) -> Division | None:
        divide = _DIVISIONS.get(op.type)
        if self.count == 1 or divide is None:
            return None
        division = divide(op, batched)
        if division is None:
            return None
        divided = [x for x, apart in zip(op.inputs, division.divided, strict=True) if apart]
        taken_apart = divided if division.combine else [*divided, *op.outputs]
        if all(len(x.shape) and x.shape[0] % self.count == 0 for x in taken_apart):
            return division
        return None

    def _coupled(self, operations: Iterable[tf.Operation], batched: set[int]) -> bool:
        """Whether what is done to one sample depends on others."""
        batched, mixed = set(batched), set()
        for op in operations:
            if op.type in _OF_SHAPES:
                continue
            if op.type == "IdentityN":
                for x, y in zip(op.inputs, op.outputs, strict=True):
                    for ids in (batched, mixed):
                        ids.update([id(y)] if id(x) in ids else [])
                continue
            division = self._division(op, [id(x) in batched for x in op.inputs])
            of_others = any(id(x) in mixed for x in op.inputs)
            if division is None or division.combine:
                if of_others or any(id(x) in batched for x in op.inputs):
                    mixed.update(map(id, op.outputs))
            elif of_others:
                return True
            else:
                batched.update(map(id, op.outputs))
        return False


def _nbytes(x: tf.Tensor) -> int:
    return math.prod(x.shape) * x.dtype.size if x.shape.is_fully_defined() else 0


Divide = Callable[[tf.Operation, Sequence[bool]], "Division | None"]
_DIVISIONS: dict[str, Divide] = {}


def _divides(*types: str) -> Callable[[Divide], Divide]:
    def add(divide: Divide) -> Divide:
        _DIVISIONS.update(dict.fromkeys(types, divide))
        return divide

    return add


@_divides(
    *("Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan", "Pow"),
    *("Maximum", "Minimum", "SquaredDifference", "FloorDiv", "FloorMod", "Xlogy", "Xdivy"),
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"),
    *("LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2"),
    *("Cast", "Identity", "StopGradient", "PreventGradient", "CheckNumerics"),
    *("ZerosLike", "OnesLike", "Abs", "Neg", "Sign", "Floor", "Ceil", "Round", "Rint"),
    *("Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "Reciprocal", "Inv"),
    *("Sin", "Cos", "Erf", "Erfc", "BiasAdd"),
    *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign"),
    *("ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SigmoidGrad", "TanhGrad"),
    *("SoftplusGrad", "SoftsignGrad", "RsqrtGrad", "SqrtGrad", "ReciprocalGrad", "InvGrad"),
)
def _elementwise(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    rows, rank = op.outputs[0].shape[:1], len(op.outputs[0].shape)
    divided = [len(x.shape) == rank and x.shape[:1] == rows for x in op.inputs]
    if op.type == "Select" and len(op.inputs[0].shape) == 1:
        divided[0] = True  # a condition for each row
    fits = all(divided[k] for k, is_batched in enumerate(batched) if is_batched)
    return Division(divided) if fits and any(batched) else None


@_divides(
    *("Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "Softmax", "LogSoftmax"),
    *("ResizeNearestNeighbor", "ResizeBilinear", "DepthToSpace", "SpaceToDepth"),
    *("ResizeNearestNeighborGrad", "TopKV2"),
)
def _by_first(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """Samples are the rows of the first input, and the others none of samples."""
    first, *others = batched
    if len(op.inputs[0].shape) < 2:
        return None  # a row has several elements
    return Division([True, *[False] * len(others)]) if first and not any(others) else None


@_divides("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", "AvgPoolGrad")
def _by_last(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """As `_by_first`, of the last."""
    *others, last = batched
    return Division([*[False] * len(others), True]) if last and not any(others) else None


@_divides(
    *("MaxPoolGrad", "ResizeBilinearGrad"),
    *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"),
)
def _by_all(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """Samples are the rows of every input."""
    return Division([True] * len(batched)) if all(batched) else None


@_divides("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter")
def _kernel_gradient(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    return Division([True, False, True], _sum) if batched[0] and batched[2] else None


@_divides("BiasAddGrad")
def _bias_gradient(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    return Division([True], _sum) if batched[0] else None


@_divides("MatMul")
def _matmul(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    if batched[0] and not batched[1] and not op.get_attr("transpose_a"):
        return Division([True, False])
    transposes = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    return Division([True, True], _sum) if all(batched) and transposes == (True, False) else None


@_divides("BatchMatMulV2")
def _batch_matmul(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """Each matrix by itself, as elements are."""
    return _elementwise(op, batched) if len(op.outputs[0].shape) > 2 else None


@_divides("Sum", "Mean", "Max", "Min", "ArgMax", "All", "Any")
def _reduction(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    axes = tf.get_static_value(op.inputs[1])
    if not batched[0] or axes is None:
        return None
    if not any(int(axis) % len(op.inputs[0].shape) == 0 for axis in np.ravel(axes)):
        return Division([True, False])
    combine = {"Sum": _sum, "Mean": _mean}.get(op.type) if op.inputs[0].dtype.is_floating else None
    return Division([True, False], combine) if combine else None


@_divides("Reshape", "BroadcastTo")
def _to_shape(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """Into parts of the shape it gets: of an array in memory, a part is a part in any shape."""
    x, y = op.inputs[0].shape, op.outputs[0].shape
    in_order = op.type == "Reshape" or (len(x) == len(y) and x[:1] == y[:1])
    if not batched[0] or not in_order:
        return None
    function = tf.reshape if op.type == "Reshape" else tf.broadcast_to

    def emit(op: tf.Operation, inputs: Sequence[tf.Tensor], count: int) -> tf.Tensor:
        rows, *rest = op.outputs[0].shape
        return function(inputs[0], [rows // count, *rest])

    return Division([True, False], emit=emit)


@_divides("Pad", "PadV2", "MirrorPad", "Tile", "ExpandDims")
def _beside_rows(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """If there are as many rows before as after."""
    same = op.inputs[0].shape[:1] == op.outputs[0].shape[:1]
    return Division([True, *[False] * (len(batched) - 1)]) if batched[0] and same else None


@_divides("Transpose")
def _transpose(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    permutation = tf.get_static_value(op.inputs[1])
    stays = permutation is not None and permutation[0] == 0
    return Division([True, False]) if batched[0] and stays else None


@_divides("Squeeze")
def _squeeze(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    axes = op.get_attr("squeeze_dims")
    rank = len(op.inputs[0].shape)
    return Division([True]) if batched[0] and axes and all(k % rank for k in axes) else None


@_divides("StridedSlice")
def _strided_slice(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    strides = tf.get_static_value(op.inputs[3])
    masks = {
        name: op.get_attr(f"{name}_mask") & 1
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if not batched[0] or strides is None or masks["new_axis"] or masks["shrink_axis"]:
        return None
    if masks["ellipsis"]:  # `...` stands for the rows, if anything
        all_rows = len(op.inputs[0].shape) >= len(strides)
    else:
        all_rows = masks["begin"] and masks["end"] and strides[0] == 1
    return Division([True, False, False, False]) if all_rows else None


@_divides("ConcatV2")
def _concatenate(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    axis = tf.get_static_value(op.inputs[-1])
    if not any(batched) or axis is None or int(axis) % len(op.outputs[0].shape) == 0:
        return None
    return Division([*[True] * (len(batched) - 1), False])


@_divides("Slice")
def _slice(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    rows, begin = op.inputs[0].shape[:1], tf.get_static_value(op.inputs[1])
    if not batched[0] or begin is None or begin[0] != 0 or op.outputs[0].shape[:1] != rows:
        return None

    def emit(op: tf.Operation, inputs: Sequence[tf.Tensor], count: int) -> tf.Tensor:
        rows, *rest = op.outputs[0].shape
        return tf.slice(inputs[0], inputs[1], [rows // count, *rest])

    return Division([True, False, False], emit=emit)


@_divides("OneHot")
def _one_hot(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    axis = op.get_attr("axis") % len(op.outputs[0].shape)
    return Division([True, False, False, False]) if batched[0] and axis != 0 else None


@_divides("GatherV2")
def _gather(op: tf.Operation, batched: Sequence[bool]) -> Division | None:
    """Rows of a table, such as an embedding's, or something of each row."""
    axis = tf.get_static_value(op.inputs[2])
    by_row = op.get_attr("batch_dims") > 0
    if batched[1] and batched[0] == by_row and (by_row or (axis is not None and int(axis) == 0)):
        return Division([by_row, True, False])
    return None


def _sum(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(operator.add, parts)


def _mean(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return _sum(parts) * (1 / len(parts))
