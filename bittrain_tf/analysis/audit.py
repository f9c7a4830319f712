"""`analyze`: what a training step keeps for its backward pass, read from the traced step.

A table of layers would say what should be kept. The graph says what is: it holds
for any layer, compressed or not, and one forgotten reader of a dense tensor shows.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf import allocator
from bittrain_tf.analysis.graph import StepGraph, key
from bittrain_tf.analysis.kept import DENSE, INPUT, MASK, SMALL, Analysis, Holder, KeptTensor
from bittrain_tf.analysis.liveness import original
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
    try:
        return StepAudit(model, x, y, loss=loss).analysis()
    finally:
        allocator.return_freed()  # of the trace


class StepAudit:
    """A traced step and what it keeps, with the weights of the time it is asked.

    Tracing takes longer than running the forward pass, so that a model in training is
    best traced once.

    Args:
        model: See `analyze`, also for what is raised.
        x: See `analyze`.
        y: See `analyze`.
        loss: See `analyze`.
    """

    def __init__(
        self, model: keras.Model, x: Any, y: Any = None, *, loss: Loss | None = None
    ) -> None:
        x, y = _checked(model, x, y)
        self._name, self._batch = model.name, (x, y)
        self._found: list[_Found] = []

        @tf.function(autograph=False)
        def count(x: Any, y: Any) -> tf.Tensor:
            # Traced twice if that creates variables.
            self._found[:] = _audit(trace(model, x, y, loss))
            # Only this is returned, so of the step only the forward pass is run.
            return _stacked_counts(self._found)

        self._count = count.get_concrete_function(x, y)

    def analysis(self) -> Analysis:
        """What is kept, the largest first."""
        return Analysis(self._name, tuple(sorted(self.rows(), key=lambda row: -row.bytes)))

    def rows(self) -> list[KeptTensor]:
        """What is kept, in the order of the forward pass."""
        return [row for row in _rows(self._found, self._count(*self._batch)) if row is not None]


def kept_tensors(
    model: keras.Model, x: Any, y: Any = None, *, loss: Loss | None = None
) -> list[tuple[KeptTensor, tf.Tensor]]:
    """What one training step keeps, and the tensors themselves, in the order of the forward pass.

    They are all in memory at a time, as in training.

    Args:
        model: See `analyze`, also for what is raised.
        x: See `analyze`.
        y: See `analyze`.
        loss: See `analyze`.
    """
    x, y = _checked(model, x, y)
    found: list[_Found] = []

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        found[:] = _audit(trace(model, x, y, loss))
        return _stacked_counts(found), [f.tensor for f in found]

    counts, tensors = step.get_concrete_function(x, y)(x, y)
    rows = zip(_rows(found, counts), tensors, strict=True)
    return [(row, tensor) for row, tensor in rows if row is not None]


def _checked(model: keras.Model, x: Any, y: Any) -> tuple[Any, Any]:
    """The batch as tensors, if it fits the model."""
    check_model(model)
    x, y = batch_tensors("x", x), batch_tensors("y", y)
    check_batch(model, x, y)
    return x, y


def _stacked_counts(found: list[_Found]) -> tf.Tensor:
    return tf.stack([f.counts for f in found]) if found else tf.zeros([0, 2], tf.int64)


def _rows(found: list[_Found], counts: tf.Tensor) -> list[KeptTensor | None]:
    """A row for each tensor; None for one of no elements."""
    return [
        f.row(int(size), int(nonzero)) if size else None
        for f, (size, nonzero) in zip(found, counts.numpy(), strict=True)
    ]


class _Found:
    """A kept tensor whose size is still to be measured.

    Args:
        tensor: The tensor.
        dtype: Its dtype; for a list of tensors, that of the elements.
        layer: The layer that made it.
        source: The layer whose activation it is.
        is_input: Whether it is a part of the batch.
        holders: Who keeps it.
    """

    def __init__(
        self,
        tensor: tf.Tensor,
        dtype: tf.DType,
        layer: str,
        source: str,
        is_input: bool,
        holders: tuple[Holder, ...],
    ) -> None:
        self._name, self._dtype = tensor.name, dtype
        # Native kernels make masks beside what else they compute.
        self._is_mask = dtype == tf.uint8 and tensor.op.type.startswith(OPERATION_PREFIX)
        self._layer, self._source = layer, source
        self._is_input, self._holders = is_input, holders
        if tensor.dtype == tf.variant:
            tensor = _stacked(tensor, dtype)
        self._shape = tensor.shape
        self.tensor = tensor
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
            source=self._source,
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
    """The tensors that the backward pass of a step keeps, in the order they are made."""
    graph = StepGraph(step.graph, step.data, step.seed, step.gradients)
    scopes, inputs = step.scopes, {key(t) for t in step.data}
    position = {op.name: i for i, op in enumerate(step.graph.get_operations())}
    found = []
    for tensor, operations in sorted(graph.kept(), key=lambda kept: position[kept[0].op.name]):
        dtype = graph.list_element_dtype(tensor) if tensor.dtype == tf.variant else tensor.dtype
        if dtype is None or not dtype.size:
            continue  # text, and handles of things that are no activations
        holders = (Holder(scopes.layer_of(op.name), _operation_text(op)) for op in operations)
        found.append(
            _Found(
                tensor,
                dtype,
                scopes.layer_of(tensor.op.name),
                scopes.layer_of(_encoded(tensor).op.name),
                key(tensor) in inputs,
                tuple(dict.fromkeys(holders)),
            )
        )
    return found


def _encoded(tensor: tf.Tensor) -> tf.Tensor:
    """What an encoding is of; other tensors, masks among them, as they are."""
    part = codec_of(tensor.op.name)
    if part is None or part[0] != "encode" or part[1] == MASK:
        return tensor
    read = tensor
    while codec_of(read.op.name) == part:
        floats = [t for t in read.op.inputs if t.dtype.is_floating]
        if not floats:
            return tensor
        read = original(floats[0])
    return read


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
