"""A Keras model, its loss and its optimizer as a `.tflite` that trains."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from ai_edge_litert import schema_py_generated as schema

from bittrain_tf.rewrite import classes_for_tracing, exported_classes
from tflite_tools import control, guards, manifest, microbatches, scheduling
from tflite_tools import flatbuffer as fb
from tflite_tools.convert import convert
from tflite_tools.files import refuse_to_overwrite
from tflite_tools.graph import Graph
from tflite_tools.training import NOTHING, Training, transfer, transfer_shape

# The signatures that compute something.
_COMPUTING = ("train", "evaluate", "infer")
# Those whose results depend on the shapes of the whole batch.
_STEPS = ("train", "evaluate")
# What tracing switches, the classes of layers and how functions run, is there once.
_TRACING = threading.Lock()
# Bytes that the interpreter takes for an operator and its tensors: measured, 1.8 to 2.1 KB.
_OPERATOR = 2000


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file.
        nbytes: Its size.
        scheduled: What scheduling made of each signature, by name.
        manifest: What the file says of itself.
    """

    path: pathlib.Path
    nbytes: int
    scheduled: dict[str, scheduling.Scheduled]
    manifest: dict[str, Any]


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    loss: str | keras.losses.Loss | Callable[..., Any],
    optimizer: str | keras.optimizers.Optimizer,
    batch_size: int,
    metrics: Sequence[str | Callable[..., Any]] = (),
    sample_weight: bool = False,
    time_budget: float = 1.1,
    delegate: bool = False,
    overwrite: bool = False,
) -> Exported:
    """Write a `.tflite` that trains `model`, with builtin operators only.

    Its signatures:

    * `train(x, y, learning_rate)`, one step: `loss` and the metrics;
    * `evaluate(x, y)`: the same without training;
    * `infer(x)`: `output`;
    * `get_weights(nothing)`, `set_weights(...)`: all variables by name, those of the optimizer
      and the statistics of normalizations included;
    * `reset(nothing)`: everything as it was when the file was written.

    A model of several inputs takes each by its own name instead of `x`. With `sample_weight`,
    `train` and `evaluate` take `sample_weight`, one number a sample. `nothing` is one number that
    is not used, since a signature must have an input.

    What the device computes is what Keras computes: its own step is traced, and gradients that
    have no builtin operator are written with those there are (see `tflite_tools.rules`). Frozen
    layers stay as they are, and so do the thresholds at which outputs are pruned. Random layers
    draw new numbers in each step, those of the device.

    Args:
        model: A built model of fixed input shapes and one output. Its weights now are the file's.
        path: Where to write.
        loss: A Keras loss or its name, or a function `loss(y, prediction)` of TensorFlow.
        optimizer: A Keras optimizer or its name. One that has trained the model goes on from
            where it is.
        batch_size: The size of every batch, in `infer`, too.
        metrics: Names of Keras's metric functions (`"sparse_categorical_accuracy"`), or functions
            `metric(y, prediction)`.
        sample_weight: Whether samples have weights.
        time_budget: How long a step may take, as a ratio to one that keeps all it needs, by an
            estimate. What does not pay to keep is made again where it is needed, bit for bit.
        delegate: Whether the interpreter may hand `train`, `evaluate` and `infer` to its default
            delegate (XNNPACK). That takes more memory, some kilobytes an operator, and cannot take
            over convolutions whose kernels are trained.
        overwrite: Whether to replace what is at `path`.

    Raises:
        UnsupportedError: If a layer cannot be trained by builtin operators; nothing is written.
        FileExistsError: If `path` exists and `overwrite` is False.
        ValueError: If the model is not one that can be exported, or an argument has no meaning.
    """
    path = pathlib.Path(path)
    scheduling.check_time_budget(time_budget)
    refuse_to_overwrite(path, overwrite)
    _check(model, batch_size)
    training = Training(
        model,
        _loss(loss),
        keras.optimizers.get(optimizer),
        dict(map(_metric, metrics)),
        batch_size,
        sample_weight,
    )
    candidates = []
    for parts in sorted({microbatches.count(batch_size), 1}, reverse=True):
        file = converted(training, parts)
        scheduled = _arrange(file, time_budget, delegate)
        candidates.append((_nbytes(scheduled["train"]), len(candidates), file, scheduled))
    *_, file, scheduled = min(candidates)
    about = describe(file, training)
    fb.write(file, path, overwrite=overwrite)
    return Exported(path, path.stat().st_size, scheduled, about)


def converted(training: Training, parts: int) -> schema.ModelT:
    """The file as the converter makes it, of a step in so many microbatches."""
    named = {name: v.value for name, v in training.variables().items()}
    model = training.model
    # What `bittrain_tf.compress` made of its layers is for the machine it trains on.
    with _TRACING, classes_for_tracing(model, exported_classes(model)):
        content = convert(
            {**training.signatures(), **transfer(named)},
            [*named.values(), training.optimizer.learning_rate.value],
            [v.value for v in training.random_states()],
            parts,
        )
    file = fb.parse(content, "what the converter made")
    _rename(file, list(named))
    return file


def describe(file: schema.ModelT, training: Training) -> dict[str, Any]:
    """Attach the manifest, with the predicted peak of each signature, and return it."""
    peaks = {
        fb.text(s.signatureKey): Graph(file, s.subgraphIndex).peak().nbytes
        for s in fb.listed(file.signatureDefs)
    }
    about = _manifest(training, peaks)
    manifest.attach(file, about)
    return about


def _check(model: keras.Model, batch_size: int) -> None:
    if not isinstance(model, keras.Model) or not model.built or not hasattr(model, "inputs"):
        raise ValueError(
            f"{model!r} is not a built Keras model. Build it, with an input shape or by calling it."
        )
    if len(model.outputs) != 1:
        raise ValueError(
            f"The model has {len(model.outputs)} outputs; export takes one. Concatenate them, or "
            "export a model of the one that is trained."
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number from 1, not {batch_size!r}.")
    for variable in model.trainable_variables:
        if keras.backend.standardize_dtype(variable.dtype) != "float32":
            raise ValueError(
                f"{variable.path} is {variable.dtype}; TensorFlow Lite trains in float32. Build "
                "the model with that."
            )
    for layer in model.layers:
        if layer.compute_dtype not in ("float32", None):
            raise ValueError(
                f"Layer {layer.name!r} computes in {layer.compute_dtype}; TensorFlow Lite trains "
                'in float32. Build the model under keras.config.set_dtype_policy("float32").'
            )


def _loss(loss: Any) -> Any:
    if isinstance(loss, str):
        # By name Keras gives a function of each sample; its class also takes weights.
        name = "".join(part.capitalize() for part in loss.split("_"))
        if hasattr(keras.losses, name):
            return getattr(keras.losses, name)()
    return keras.losses.get(loss)


def _metric(metric: str | Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    if not isinstance(metric, str):
        return getattr(metric, "__name__", type(metric).__name__), metric
    found = getattr(keras.metrics, metric, None)
    if not callable(found) or isinstance(found, type):
        raise ValueError(
            f"Keras has no metric function {metric!r}. Give the name of one, such as "
            "'sparse_categorical_accuracy', or a function metric(y, prediction)."
        )
    return metric, found


def _arrange(
    file: schema.ModelT, time_budget: float, delegate: bool
) -> dict[str, scheduling.Scheduled]:
    """Schedule a file; what came of it, by signature."""
    by_subgraph = scheduling.arrange(file, time_budget)
    scheduled = {}
    for signature in fb.listed(file.signatureDefs):
        name = fb.text(signature.signatureKey)
        scheduled[name] = by_subgraph[signature.subgraphIndex]
        if name in _COMPUTING and not delegate:
            control.keep_from_delegates(file.subgraphs[signature.subgraphIndex])
        if name in _STEPS:
            guards.refuse_other_shapes(file, signature.subgraphIndex)
    control.chain(file)  # again, now that there are checks
    return scheduled


def _nbytes(scheduled: scheduling.Scheduled) -> int:
    return scheduled.after + _OPERATOR * scheduled.operators


def _rename(file: schema.ModelT, names: Sequence[str]) -> None:
    """Give the inputs and outputs that stand for variables the variables' names."""
    for signature in fb.listed(file.signatureDefs):
        if fb.text(signature.signatureKey) not in ("get_weights", "set_weights"):
            continue
        for tensor in (*fb.listed(signature.inputs), *fb.listed(signature.outputs)):
            name = fb.text(tensor.name)
            if name[:1] == "v" and name[1:].isdigit():
                tensor.name = names[int(name[1:])].encode()


def _manifest(training: Training, peaks: Mapping[str, int]) -> dict[str, Any]:
    config = json.dumps(training.model.get_config(), sort_keys=True, default=str)
    # The inputs of set_weights are the variables.
    inputs = {name: signature.specs for name, signature in training.signatures().items()}
    inputs |= {"get_weights": [NOTHING], "reset": [NOTHING]}
    return {
        "batch_size": training.batch_size,
        "model": {
            "name": training.model.name,
            "sha256": hashlib.sha256(config.encode()).hexdigest(),
        },
        "optimizer": type(training.optimizer).__name__,
        "learning_rate": float(training.optimizer.learning_rate),
        "signatures": {
            name: {
                "inputs": [
                    {"name": x.name, "shape": x.shape.as_list(), "dtype": x.dtype.name}
                    for x in specs
                ],
                "predicted_peak": peaks[name],
            }
            for name, specs in inputs.items()
        },
        "variables": [
            {"name": name, "shape": transfer_shape(v.shape), "dtype": v.dtype}
            for name, v in training.variables().items()
        ],
        "versions": {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "ai-edge-litert": importlib.metadata.version("ai-edge-litert"),
        },
    }
