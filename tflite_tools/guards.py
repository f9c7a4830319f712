"""What makes an interpreter refuse inputs of other shapes than the file was made for.

Interpreters resize their inputs to what they are given, those for Python and Android without being
asked. A training step has sizes written into it: where a batch of another size does not happen to
fail, the gradients are of another loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tflite_tools import flatbuffer as fb

_MOST_DIMENSIONS = 5  # that TensorFlow Lite takes slices of


def refuse_other_shapes(file: schema.ModelT, number: int) -> None:
    """Begin a subgraph with operators that cannot be prepared if an input has another shape.

    Each takes one line of an input along one dimension, and gives it that dimension's size. Inputs
    of more than five dimensions are not checked.
    """
    subgraph = file.subgraphs[number]
    checks: list[schema.OperatorT] = []
    for x in fb.listed(subgraph.inputs):
        shape = fb.listed(subgraph.tensors[x].shape)
        dtype = fb.dtype(subgraph.tensors[x])
        if not shape:
            checks.append(_reshape(file, subgraph, x, 1, dtype))
        if len(shape) > _MOST_DIMENSIONS:
            continue
        for axis, size in enumerate(shape):
            line = np.ones(len(shape), np.int32)
            line[axis] = -1  # all that there is
            begin = _add(file, subgraph, [len(shape)], "int32", np.zeros_like(line))
            extent = _add(file, subgraph, [len(shape)], "int32", line)
            taken = _add(file, subgraph, np.where(line < 0, size, 1), dtype)
            checks.append(_operator(file, "SLICE", [x, begin, extent], taken))
            checks.append(_reshape(file, subgraph, taken, size, dtype))
    subgraph.operators = [*checks, *fb.listed(subgraph.operators)]


def _reshape(
    file: schema.ModelT, subgraph: schema.SubGraphT, tensor: int, size: int, dtype: str
) -> schema.OperatorT:
    """Into a vector of that size."""
    options = schema.ReshapeOptionsT()
    options.newShape = np.array([size], np.int32)
    output = _add(file, subgraph, [size], dtype)
    operator = _operator(file, "RESHAPE", [tensor], output)
    operator.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    operator.builtinOptions = options
    return operator


def _add(
    file: schema.ModelT,
    subgraph: schema.SubGraphT,
    shape: Sequence[int],
    dtype: str,
    value: np.ndarray | None = None,
) -> int:
    """The number of a new tensor, constant if it has a value."""
    tensor = schema.TensorT()
    tensor.name = f"shape_check_{len(subgraph.tensors)}".encode()
    tensor.shape = np.array(shape, np.int32)
    tensor.type = getattr(schema.TensorType, dtype.upper())
    tensor.hasRank = True
    tensor.buffer = 0  # of what has no elements in the file
    if value is not None:
        tensor.buffer = fb.add_buffer(file, np.frombuffer(value.tobytes(), np.uint8))
    subgraph.tensors = [*subgraph.tensors, tensor]
    return len(subgraph.tensors) - 1


def _operator(
    file: schema.ModelT, name: str, inputs: Sequence[int], output: int
) -> schema.OperatorT:
    number = getattr(schema.BuiltinOperator, name)
    codes = [max(c.builtinCode, c.deprecatedBuiltinCode) for c in file.operatorCodes]
    if number not in codes:
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = number
        code.version = 1
        file.operatorCodes = [*file.operatorCodes, code]
        codes.append(number)
    operator = schema.OperatorT()
    operator.opcodeIndex = codes.index(number)
    operator.inputs = np.array(inputs, np.int32)
    operator.outputs = np.array([output], np.int32)
    return operator
