"""Read and write `.tflite` files: the schema's objects, and errors a person can act on."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tflite_tools.files import refuse_to_overwrite, write_whole

_IDENTIFIER = b"TFL3"
# Before the checksum of all that precedes it, at the end of files written here: readers of
# flatbuffers do not mind what follows one.
_SEAL = b"bittrain"
_CHECKSUM = hashlib.sha256
# A shape of more is damage: it would be gigabytes.
_MOST_ELEMENTS = 1 << 30
_NAMES = {
    code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)
}
_TYPE_NAMES = {
    code: name.lower() for name, code in vars(schema.TensorType).items() if isinstance(code, int)
}
_TYPE_BITS = {
    "float64": 64,
    "int64": 64,
    "uint64": 64,
    "complex64": 64,
    "complex128": 128,
    "float32": 32,
    "int32": 32,
    "uint32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int16": 16,
    "uint16": 16,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
    "int4": 4,
    "uint4": 4,
    "int2": 2,
}


class FileFormatError(ValueError):
    """A file is not a `.tflite`, or not a whole one."""


def read(path: str | os.PathLike[str]) -> schema.ModelT:
    """The model in a `.tflite` file.

    Raises:
        FileFormatError: If it is something else, or truncated or corrupted.
    """
    path = pathlib.Path(path)
    return parse(path.read_bytes(), path)


def parse(content: bytes, path: str | os.PathLike[str]) -> schema.ModelT:
    """`read` of what is in memory; `path` is for the message of an error."""
    with _reading(content, path):
        _check(schema.Model.GetRootAs(content, 0))
        return schema.ModelT.InitFromPackedBuf(content, 0)


def metadata(path: str | os.PathLike[str], name: str) -> bytes | None:
    """What a whole `.tflite` file has attached under `name`, without making objects of the rest.

    Raises:
        FileFormatError: As `read`.
    """
    path = pathlib.Path(path)
    content = path.read_bytes()
    with _reading(content, path):
        model = schema.Model.GetRootAs(content, 0)
        _check(model)
        for i in range(model.MetadataLength()):
            if text(model.Metadata(i).Name()) == name:
                data = model.Buffers(model.Metadata(i).Buffer()).DataAsNumpy()
                return b"" if isinstance(data, int) else data.tobytes()
    return None


@contextlib.contextmanager
def _reading(content: bytes, path: str | os.PathLike[str]) -> Iterator[None]:
    if content[4:8] != _IDENTIFIER:
        raise FileFormatError(
            f"{path} is not a .tflite file: it has {content[4:8]!r} where {_IDENTIFIER!r} is "
            f"expected ({len(content)} bytes in all). Give a file that a converter wrote."
        )
    sealed, seal, checksum = _split(content)
    if seal == _SEAL and _CHECKSUM(sealed).digest() != checksum:
        raise FileFormatError(
            f"{path} ({len(content)} bytes) is corrupted: its checksum is another than when it was "
            "written. Export it again, or copy it again from where it was made."
        )
    try:
        yield
    except (struct.error, ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
        raise FileFormatError(
            f"{path} ({len(content)} bytes) is truncated or corrupted: {error}. Export it "
            "again, or copy it again from where it was made."
        ) from error


def _check(model: schema.Model) -> None:
    """Raise ValueError if an index of the model leads nowhere, or data is missing."""
    if not model.SubgraphsLength():
        raise ValueError("it has no subgraph")
    buffers, codes = model.BuffersLength(), model.OperatorCodesLength()
    for i in range(buffers):
        model.Buffers(i).DataAsNumpy()
    for number in range(model.SubgraphsLength()):
        subgraph = model.Subgraphs(number)
        tensors = subgraph.TensorsLength()
        for i in range(tensors):
            tensor = subgraph.Tensors(i)
            shape = tensor.ShapeAsNumpy()
            sizes = [] if isinstance(shape, int) else shape.tolist()
            if math.prod(max(size, 1) for size in sizes) > _MOST_ELEMENTS:
                raise ValueError(f"tensor {i} of subgraph {number} has shape {sizes}")
            if not 0 <= tensor.Buffer() < max(buffers, 1):
                raise ValueError(
                    f"subgraph {number} refers to buffer {tensor.Buffer()} of {buffers}"
                )
        for i in range(subgraph.OperatorsLength()):
            op = subgraph.Operators(i)
            if not 0 <= op.OpcodeIndex() < codes:
                raise ValueError(
                    f"subgraph {number} refers to operator {op.OpcodeIndex()} of {codes}"
                )
            _check_tensors(number, tensors, op.InputsAsNumpy(), op.OutputsAsNumpy())
        _check_tensors(number, tensors, subgraph.InputsAsNumpy(), subgraph.OutputsAsNumpy())
    for i in range(model.SignatureDefsLength()):
        signature = model.SignatureDefs(i)
        number = signature.SubgraphIndex()
        if not 0 <= number < model.SubgraphsLength():
            raise ValueError(f"a signature refers to subgraph {number}")
        tensors = model.Subgraphs(number).TensorsLength()
        inputs = [signature.Inputs(k).TensorIndex() for k in range(signature.InputsLength())]
        outputs = [signature.Outputs(k).TensorIndex() for k in range(signature.OutputsLength())]
        _check_tensors(number, tensors, np.array([*inputs, *outputs]))


def _check_tensors(number: int, count: int, *referred: np.ndarray | int) -> None:
    for numbers in referred:
        # Of what has none, the schema's answer is 0.
        for tensor in () if isinstance(numbers, int) else numbers.tolist():
            if not -1 <= tensor < count:
                raise ValueError(f"subgraph {number} refers to tensor {tensor} of {count}")


def write(model: schema.ModelT, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a `.tflite` file, whole or not at all.

    Raises:
        FileExistsError: If there is one and `overwrite` is False.
    """
    path = pathlib.Path(path)
    refuse_to_overwrite(path, overwrite)
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    content = bytes(builder.Output())
    write_whole(path, content + _SEAL + _CHECKSUM(content).digest())


def _split(content: bytes) -> tuple[bytes, bytes, bytes]:
    """A file's content, seal and checksum, if it has these."""
    end = len(content) - _CHECKSUM().digest_size
    start = end - len(_SEAL)
    return content[:start], content[start:end], content[end:]


def listed(values: Any) -> list[Any]:
    """The schema's way of saying "none" is None, and its integers are NumPy's."""
    if values is None:
        return []
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def op_name(model: schema.ModelT, op: schema.OperatorT) -> str:
    """The name of an operator, `"CONV_2D"`; of a custom one, its own."""
    number = _op_number(model, op)
    if number == schema.BuiltinOperator.CUSTOM:
        return text(model.operatorCodes[op.opcodeIndex].customCode) or "CUSTOM"
    return _NAMES.get(number, f"UNKNOWN_{number}")


def is_custom(model: schema.ModelT, op: schema.OperatorT) -> bool:
    """Whether an operator is not one of the builtin ones."""
    number = _op_number(model, op)
    return number == schema.BuiltinOperator.CUSTOM or number not in _NAMES


def custom_names(model: schema.ModelT, subgraph: schema.SubGraphT) -> set[str]:
    """The names of a subgraph's operators that are not builtin ones."""
    return {op_name(model, op) for op in listed(subgraph.operators) if is_custom(model, op)}


def _op_number(model: schema.ModelT, op: schema.OperatorT) -> int:
    code = model.operatorCodes[op.opcodeIndex]
    # Files from before there were 127 operators have the older field only.
    return max(code.builtinCode, code.deprecatedBuiltinCode)


def set_metadata(model: schema.ModelT, name: str, content: bytes) -> None:
    """Attach `content` to a model under `name`, in place of what it has there."""
    data = np.frombuffer(content, np.uint8)
    for metadata in listed(model.metadata):
        if text(metadata.name) == name:
            model.buffers[metadata.buffer].data = data
            return
    metadata = schema.MetadataT()
    metadata.name, metadata.buffer = name.encode(), add_buffer(model, data)
    model.metadata = [*listed(model.metadata), metadata]


def add_buffer(model: schema.ModelT, data: np.ndarray) -> int:
    """The number of a new buffer with these bytes."""
    buffer = schema.BufferT()
    buffer.data = data
    model.buffers = [*model.buffers, buffer]
    return len(model.buffers) - 1


def text(value: bytes | str | None) -> str:
    """A string of the schema."""
    return value.decode() if isinstance(value, bytes) else value or ""


def dtype(tensor: schema.TensorT) -> str:
    """The type of a tensor's elements, `"float32"`."""
    return _TYPE_NAMES.get(tensor.type, f"type {tensor.type}")


def shape(tensor: schema.TensorT) -> list[int]:
    """A tensor's shape, -1 where it is not known before a run."""
    signature = listed(tensor.shapeSignature)
    return signature or listed(tensor.shape)


def nbytes(tensor: schema.TensorT) -> int:
    """The bytes of a tensor's elements; a dimension that is not known counts as one."""
    bits = _TYPE_BITS.get(dtype(tensor), 0)
    elements = 1
    for size in listed(tensor.shape):
        elements *= max(size, 1)
    return (elements * bits + 7) // 8


def is_constant(model: schema.ModelT, tensor: schema.TensorT) -> bool:
    """Whether a tensor's elements are in the file."""
    return len(listed(model.buffers[tensor.buffer].data)) > 0 if model.buffers else False
