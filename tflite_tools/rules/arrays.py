"""Shapes, views and sums: what only says how tensors are laid out."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tflite_tools.rules.registry import attribute, register, static_shape


@register("StopGradient", "PreventGradient", "CheckNumerics", "Snapshot", "IdentityN")
def pass_on(op: tf.Operation, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """The inputs, where only tapes and debuggers see a difference."""
    return [tf.identity(x) for x in inputs[: len(op.outputs)]]


@register("Shape", "ShapeN")
def shape(op: tf.Operation, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Constants: every size is known."""
    dtype = attribute(op, "out_type")
    return [tf.constant(static_shape(x), dtype) for x in inputs]


@register("Size")
def size(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """A constant."""
    return tf.constant(int(np.prod(static_shape(x))), attribute(op, "out_type"))


@register("BroadcastGradientArgs")
def broadcast_gradient_arguments(
    op: tf.Operation, left: tf.Tensor, right: tf.Tensor
) -> list[tf.Tensor]:
    """Over which dimensions each of two broadcast operands is summed."""
    shapes = [tf.get_static_value(s) for s in (left, right)]
    if any(s is None for s in shapes):
        raise NotImplementedError("of shapes that are computed")
    shapes = [list(s) for s in shapes]
    rank = max(map(len, shapes))
    shapes = [[1] * (rank - len(s)) + s for s in shapes]
    both = list(zip(*shapes, strict=True))
    return [
        tf.constant([k for k, sizes in enumerate(both) if sizes[side] == 1], left.dtype)
        for side in (0, 1)
    ]


@register("BiasAddGrad")
def bias(op: tf.Operation, dy: tf.Tensor) -> tf.Tensor:
    """The sum over all but the channels, which are last."""
    return tf.reduce_sum(dy, list(range(len(dy.shape) - 1)))


@register("StridedSlice")
def strided_slice(op: tf.Operation, x: tf.Tensor, *where: tf.Tensor) -> tf.Tensor | None:
    """A constant, if it is of one: what other rules make of shapes must be known to them."""
    value = tf.get_static_value(x)
    if value is None or any(tf.get_static_value(t) is None for t in where):
        return None
    parts, dropped = _slices(op, list(value.shape), *where)
    cut = value[tuple(slice(*part) for part in parts)]
    return tf.constant(np.squeeze(cut, tuple(dropped)), x.dtype)


@register("StridedSliceGrad")
def strided_slice_gradient(
    op: tf.Operation, shape: tf.Tensor, *where_and_dy: tf.Tensor
) -> tf.Tensor:
    """`dy` in the place it was cut from, zeros around."""
    *where, dy = where_and_dy
    shape = [int(n) for n in tf.get_static_value(shape)]
    parts, _ = _slices(op, shape, *where)
    if any(step != 1 for _, _, step in parts):
        raise NotImplementedError("a slice with steps")
    cut = [max(stop - start, 0) for start, stop, _ in parts]
    paddings = [
        (start, length - start - size)
        for (start, _, _), length, size in zip(parts, shape, cut, strict=True)
    ]
    return tf.pad(tf.reshape(dy, cut), paddings)


def _slices(
    op: tf.Operation, shape: list[int], begin: tf.Tensor, end: tf.Tensor, strides: tf.Tensor
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Start, stop and step along each axis, and the axes that are dropped."""
    begin, end, strides = ([int(k) for k in tf.get_static_value(t)] for t in (begin, end, strides))
    masks = {
        name: int(attribute(op, f"{name}_mask"))
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    if masks["ellipsis"] or masks["new_axis"]:
        raise NotImplementedError("a slice with `...` or a new axis")
    parts, dropped = [], []
    for axis, length in enumerate(shape):
        bit = 1 << axis
        if axis >= len(begin):
            parts.append((0, length, 1))
        elif masks["shrink_axis"] & bit:
            start = begin[axis] % length
            parts.append((start, start + 1, 1))
            dropped.append(axis)
        else:
            part = slice(
                None if masks["begin"] & bit else begin[axis],
                None if masks["end"] & bit else end[axis],
                strides[axis],
            )
            parts.append(part.indices(length))
    return parts, dropped


@register("FloorMod")
def floor_mod(op: tf.Operation, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor | None:
    """A constant, if it is of constants: of an axis that is counted from the end."""
    values = [tf.get_static_value(t) for t in (x, y)]
    return None if any(v is None for v in values) else tf.constant(np.mod(*values), x.dtype)


@register("Rank")
def rank(op: tf.Operation, x: tf.Tensor) -> tf.Tensor:
    """A constant."""
    return tf.constant(len(x.shape), tf.int32)


@register("ConcatOffset")
def concat_offset(op: tf.Operation, axis: tf.Tensor, *shapes: tf.Tensor) -> list[tf.Tensor]:
    """Where each part of a concatenation begins."""
    axis, offset, offsets = int(tf.get_static_value(axis)), 0, []
    for s in shapes:
        sizes = tf.get_static_value(s)
        at = np.zeros(len(sizes), np.int32)
        at[axis] = offset
        offset += int(sizes[axis])
        offsets.append(tf.constant(at))
    return offsets


@register("InvertPermutation")
def invert_permutation(op: tf.Operation, permutation: tf.Tensor) -> tf.Tensor:
    """A constant."""
    return tf.constant(np.argsort(tf.get_static_value(permutation)), permutation.dtype)


@register("Sum", "Mean")
def reduce(op: tf.Operation, x: tf.Tensor, axes: tf.Tensor) -> tf.Tensor:
    """A sum or a mean over few dimensions: kernels and delegates take four at most."""
    over = {int(axis) % len(x.shape) for axis in np.ravel(tf.get_static_value(axes))}
    function = tf.reduce_sum if op.type == "Sum" else tf.reduce_mean
    if len(x.shape) <= 4:
        return function(x, sorted(over), keepdims=attribute(op, "keep_dims"))
    # Of what is given, which may be a part of the operation's own input.
    kept = attribute(op, "keep_dims")
    sizes = enumerate(static_shape(x))
    shape = [1 if axis in over else size for axis, size in sizes if kept or axis not in over]
    # Neighbours that are both summed over, or both not, are one dimension.
    groups: list[tuple[bool, int]] = []
    for axis, size in enumerate(static_shape(x)):
        if size == 1:
            continue
        if groups and groups[-1][0] == (axis in over):
            groups[-1] = (groups[-1][0], groups[-1][1] * size)
        else:
            groups.append((axis in over, size))
    while any(summed for summed, _ in groups):
        last = max(k for k, (summed, _) in enumerate(groups) if summed)
        outer = int(np.prod([size for _, size in groups[:last]], dtype=int))
        inner = int(np.prod([size for _, size in groups[last + 1 :]], dtype=int))
        x = function(tf.reshape(x, [outer, groups[last][1], inner]), 1)
        del groups[last]
    return tf.reshape(x, shape)


@register("PartitionedCall", "StatefulPartitionedCall")
def call(op: tf.Operation, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Not taken apart."""
    raise NotImplementedError(
        "a compiled function within the model, as Keras makes of convolutions in groups"
    )


@register("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase")
def control_flow(op: tf.Operation, *inputs: tf.Tensor) -> list[tf.Tensor]:
    """Not taken apart."""
    raise NotImplementedError(
        "a branch or a loop: recurrent layers train with unroll=True, sparse gradients of an "
        "embedding with SGD, Adam or AdamW"
    )
