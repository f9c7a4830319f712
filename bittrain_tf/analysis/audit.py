"""`analyze`: what a training step keeps for its backward pass, read from the traced step.

A table of layers would say what should be kept. The graph says what is: it holds
for any layer, compressed or not, and one forgotten reader of a dense tensor shows.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf.analysis.graph import StepGraph, key
from bittrain_tf.analysis.kept import DENSE, INPUT, MASK, SMALL, Analysis, Holder, KeptTensor
from bittrain_tf.analysis.scopes import codec_of
from bittrain_tf.analysis.tracing import Loss, TracedStep, batch_tensors, check_batch, trace
from bittrain_tf.native.kernels import OPERATION_PREFIX
from bittrain_tf.rewrite import check_model

_SMALL_BYTES = 1024
_STATISTIC_BYTES = 16384  # a float32 for each of 4096 channels
_BITS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def analyze(model: keras.Model, x: Any, y: Any = None, *, loss: Loss | None = None) -> Analysis:
    """What one training step of `model` keeps for its backward pass.

    The forward pass is run once to measure sizes and densities. Weights, moving
    statistics, random seeds and metrics stay what they are.

    Args:
        model: A built Keras model, compressed or not, compiled or not.
        x: One batch of inputs, as `model` takes them.
        y: The targets of the batch.
        loss: `loss(y, outputs)`. By default the loss the model was compiled with if `y`
            is given, else the mean of the squares of the outputs.

    Returns:
        The tensors kept, by size; see `Analysis`.

    Raises:
        TypeError: If `model` is no Keras model, or `x` a data set instead of a batch.
        ValueError: If the model is not built, or the batch does not fit it.
    """
    check_model(model)
    x, y = batch_tensors("x", x), batch_tensors("y", y)
    check_batch(model, x, y)
    audit: list[_Found] = []

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> tf.Tensor:
        audit[:] = _audit(trace(model, x, y, loss))  # traced twice if that creates variables
        # Only this is returned, so of the step only the forward pass is run.
        return tf.stack([found.counts for found in audit]) if audit else tf.zeros([0, 2], tf.int64)

    counts = step.get_concrete_function(x, y)(x, y).numpy()
    rows = [
        found.row(int(size), int(nonzero))
        for found, (size, nonzero) in zip(audit, counts, strict=True)
        if size
    ]
    return Analysis(model.name, tuple(sorted(rows, key=lambda row: -row.bytes)))


class _Found:
    """A kept tensor whose size is still to be measured.

    Args:
        tensor: The tensor.
        dtype: Its dtype; for a list of tensors, that of the elements.
        layer: The layer that made it.
        is_input: Whether it is a part of the batch.
        holders: Who keeps it.
    """

    def __init__(
        self,
        tensor: tf.Tensor,
        dtype: tf.DType,
        layer: str,
        is_input: bool,
        holders: tuple[Holder, ...],
    ) -> None:
        self._name, self._dtype = tensor.name, dtype
        # Native kernels make masks beside what else they compute.
        self._is_mask = dtype == tf.uint8 and tensor.op.type.startswith(OPERATION_PREFIX)
        self._layer, self._is_input, self._holders = layer, is_input, holders
        if tensor.dtype == tf.variant:
            tensor = _stacked(tensor, dtype)
        self._shape = tensor.shape
        self.counts = _counts(tensor)

    def row(self, size: int, nonzero: int) -> KeptTensor:
        """The finished row, for `size` elements of which `nonzero` are not zero."""
        shape = _complete(self._shape, size)
        return KeptTensor(
            layer=self._layer,
            tensor=self._name,
            shape=shape,
            dtype=self._dtype.name,
            bytes=size * self._dtype.size,
            density=nonzero / size if nonzero >= 0 else None,
            kind=self._kind(size * self._dtype.size, shape),
            holders=self._holders,
        )

    def _kind(self, nbytes: int, shape: tuple[int | None, ...]) -> str:
        if self._is_input:
            return INPUT
        part = codec_of(self._name)
        if part is not None:
            # What a decoder makes is dense; it is kept only if the decoder does not wait.
            return part[1] if part[0] == "encode" else DENSE
        if self._is_mask:
            return MASK
        # A mean or variance has one dimension, or others of length 1, and no batch.
        is_statistic = self._shape.is_fully_defined() and sum(d != 1 for d in shape) <= 1
        if nbytes < _SMALL_BYTES or (is_statistic and nbytes < _STATISTIC_BYTES):
            return SMALL
        return DENSE


def _audit(step: TracedStep) -> list[_Found]:
    """The tensors that the backward pass of a step keeps."""
    graph = StepGraph(step.graph, step.data, step.seed, step.gradients)
    scopes, inputs = step.scopes, {key(t) for t in step.data}
    found = []
    for tensor, operations in graph.kept():
        dtype = graph.list_element_dtype(tensor) if tensor.dtype == tf.variant else tensor.dtype
        if dtype is None or not dtype.size:
            continue  # text, and handles of things that are no activations
        holders = (Holder(scopes.layer_of(op.name), _operation_text(op)) for op in operations)
        found.append(
            _Found(
                tensor,
                dtype,
                scopes.layer_of(tensor.op.name),
                key(tensor) in inputs,
                tuple(dict.fromkeys(holders)),
            )
        )
    return found


def _operation_text(op: tf.Operation) -> str:
    part = codec_of(op.name)
    return "_".join(part) if part else op.type


def _stacked(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The elements of a tensor list, as one tensor."""
    shape = tf.raw_ops.TensorListElementShape(input_handle=handle, shape_type=tf.int32)
    return tf.raw_ops.TensorListStack(input_handle=handle, element_shape=shape, element_dtype=dtype)


def _counts(tensor: tf.Tensor) -> tf.Tensor:
    """Elements of a tensor and how many are not zero (-1: not known), int64 of shape [2]."""
    if tensor.dtype == tf.bool:
        nonzero = tf.math.count_nonzero(tensor)
    elif tensor.dtype.size in _BITS:
        # As bits: TensorFlow takes subnormals and -0.0 for zero.
        nonzero = tf.math.count_nonzero(tf.bitcast(tensor, _BITS[tensor.dtype.size]))
    else:
        nonzero = tf.constant(-1, tf.int64)
    return tf.stack([tf.size(tensor, out_type=tf.int64), nonzero])


def _complete(shape: tf.TensorShape, size: int) -> tuple[int | None, ...]:
    """A static shape, with its one unknown length worked out from the number of elements."""
    if shape.rank is None:
        return (size,)
    dims = shape.as_list()
    known = math.prod(d for d in dims if d is not None)
    if dims.count(None) == 1 and known:
        dims = [size // known if d is None else d for d in dims]
    return tuple(dims)
