"""Helpers the tests share: bit patterns, sparse data, compressed layers, graphs."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from bittrain_tf.layers import compressed_class, skip_reason, stock_class
from bittrain_tf.private import flatten_layers

FLOATS = ("float16", "bfloat16", "float32", "float64")
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_numpy(x) -> np.ndarray:
    return np.asarray(x.numpy() if isinstance(x, tf.Tensor | tf.Variable) else x)


def bits(x) -> np.ndarray:
    """The bit patterns of floats, as unsigned integers (other types as they are)."""
    array = to_numpy(x)
    if np.issubdtype(array.dtype, np.integer) or array.dtype == bool:
        return array
    return np.ascontiguousarray(array).view(_UNSIGNED[array.itemsize]).reshape(array.shape)


def assert_same_bits(actual, expected, what: str = "") -> None:
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.dtype == expected.dtype, what
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=what)


def sparse(shape, dtype="float32", density: float = 0.5, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers, all but `density` of them replaced by zero."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(shape) < density, rng.standard_normal(shape), 0.0)
    return np.asarray(values, tf.as_dtype(dtype).as_numpy_dtype)


def put_on(
    layer: keras.layers.Layer, codec: str | None = "bitmap", choice: str | None = None
) -> keras.layers.Layer:
    """`layer` and the layers inside, in their compressed forms unless `codec` is None."""
    if codec is not None:
        parts = [part for part in flatten_layers(layer) if skip_reason(part) is None]
        for changed in (layer, *parts):
            cls = compressed_class(stock_class(changed), codec, choice)
            object.__setattr__(changed, "__class__", cls)
    return layer


@contextlib.contextmanager
def skipping_missing_kernels() -> Iterator[None]:
    """Skip the test where TensorFlow cannot run a convolution's gradient on this CPU.

    Some gradients of dilated and of grouped convolutions have kernels in oneDNN only, which
    TensorFlow leaves out on processors without AVX512-VNNI or AVX-VNNI.
    """
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        missing = "do(es)? not (yet )?support dilation|grouped convolutions are not supported"
        if not re.search(missing, str(error)):
            raise
        pytest.skip("TensorFlow has no kernel for it on a CPU that it runs without oneDNN")


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """All operations of a graph, with those of the functions it calls, at each call."""
    for op in graph.get_operations():
        yield op
        for name in ("f", "body", "cond", "then_branch", "else_branch"):
            if name in op.node_def.attr and op.node_def.attr[name].func.name:
                called = graph._get_function(op.node_def.attr[name].func.name)
                yield from operations(called.graph)


def ancestors(op: tf.Operation) -> set[tf.Operation]:
    """The operations that `op` is computed from or waits for."""
    found, todo = set(), [op]
    while todo:
        above = todo.pop()
        new = {*(x.op for x in above.inputs), *above.control_inputs} - found
        found |= new
        todo += new
    return found


def histogram(graph: tf.Graph) -> collections.Counter:
    """How many operations of each type a graph has."""
    return collections.Counter(op.type for op in operations(graph))


def calls(graph: tf.Graph, scope: str) -> list[tf.Operation]:
    """The function calls and native operations in a name scope such as `encode_bitmap`."""
    return [
        op
        for op in graph.get_operations()
        if op.type.startswith(("PartitionedCall", "StatefulPartitionedCall", "Bittrain>"))
        and any(part.startswith(scope) for part in op.name.split("/")[:-1])
    ]
