"""What keeps delegates from undoing an order.

A delegate (XNNPACK, on by default) gathers its operators into as few partitions as it can, and so
pulls ahead what is ready, whatever the order in the file. TensorFlow Lite's graph partitioning
(tensorflow/lite/graph_info.cc) keeps to what the metadata `model_control_dependencies` says, in the
format of tensorflow/compiler/mlir/lite/experimental/remat/metadata_util.cc: unsigned integers as
varints of seven bits a byte, signed ones zigzagged first.
"""

from __future__ import annotations

from ai_edge_litert import schema_py_generated as schema

from tflite_tools import flatbuffer as fb

_NAME = "model_control_dependencies"
_VERSION = 1
_NO_DELEGATE = "VALIDATION:"


def chain(model: schema.ModelT) -> None:
    """Make every operator of `model` wait for the one before it.

    Every one: a list of dependencies replaces the order that operators with side effects have
    otherwise.
    """
    content = bytearray(_unsigned(_VERSION) + _unsigned(len(model.subgraphs)))
    for subgraph in model.subgraphs:
        waits = max(len(fb.listed(subgraph.operators)) - 1, 0)
        content += _unsigned(waits)
        for i in range(waits):
            content += _signed(i) + _signed(i + 1)
    fb.set_metadata(model, _NAME, bytes(content))


def keep_from_delegates(subgraph: schema.SubGraphT) -> None:
    """Let the interpreter run a subgraph by its own kernels.

    By its name: the interpreter gives no delegate what has the prefix of its validation subgraphs
    (tensorflow/lite/interpreter.cc, ModifyGraphWithDelegateImpl).
    """
    name = fb.text(subgraph.name)
    if not name.startswith(_NO_DELEGATE):
        subgraph.name = f"{_NO_DELEGATE}{name}".encode()


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    out.append(value)
    return bytes(out)


def _signed(value: int) -> bytes:
    return _unsigned(2 * value if value >= 0 else -2 * value - 1)
