"""Several functions into one flatbuffer of builtin operators."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tflite_tools.errors import UnsupportedError, layer_of
from tflite_tools.lowering import lower
from tflite_tools.training import Signature


def convert(
    signatures: Mapping[str, Signature],
    variables: Sequence[tf.Variable],
    ignored: Sequence[tf.Variable] = (),
    microbatches: int = 1,
) -> bytes:
    """The content of a `.tflite` with a signature for each function.

    Args:
        signatures: The functions, by the name of their signature.
        variables: What they read and assign; their values now are those in the file.
        ignored: Variables that are not to be in it.
        microbatches: Into how many parts to divide the batches.

    Raises:
        UnsupportedError: Naming the layer, if an operation has no builtin counterpart.
    """
    module = tf.Module()
    module.variables_of_the_file = list(variables)
    functions = {
        name: lower(s.fn, s.specs, ignored, s.batched, microbatches)
        for name, s in signatures.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures=functions)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=list(functions))
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        converter.experimental_enable_resource_variables = True
        try:
            return converter.convert()
        except Exception as error:
            missing = _missing(str(error))
            if not missing:
                raise
            graphs = [f.get_concrete_function().graph for f in functions.values()]
            places = {
                layer_of(op.name)
                for graph in graphs
                for op in graph.get_operations()
                if op.type in missing
            }
            raise UnsupportedError(
                ", ".join(sorted(missing)), ", ".join(sorted(places)) or "the model"
            ) from error


def _missing(message: str) -> set[str]:
    """The operations that the converter's message says it has no builtin operator for."""
    listed = re.findall(r"'tf\.(\w+)' op", message)
    for names in re.findall(r"(?:Flex|Select|Custom)(?: TensorFlow)? [Oo]ps?: ([\w, ]+)", message):
        listed += [name.removeprefix("Flex") for name in re.split(r"[, ]+", names)]
    return {name for name in listed if name}
