"""A training step as a graph: forward pass, loss and gradients, without an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bittrain_tf.analysis.scopes import LayerScopes
from bittrain_tf.private import forget_gradients

Loss = Callable[[Any, Any], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A step written into a graph.

    Attributes:
        graph: The graph.
        data: The tensors of the batch.
        seed: The gradient of the loss, from which the backward pass starts.
        gradients: The gradients of the weights.
        scopes: Which layer an operation belongs to.
    """

    graph: tf.Graph
    data: list[tf.Tensor]
    seed: tf.Tensor
    gradients: list[tf.Tensor]
    scopes: LayerScopes


def trace(model: keras.Model, x: Any, y: Any, loss: Loss | None) -> TracedStep:
    """Write a step of `model` into the graph at hand; state stays what it is."""
    if tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context():
        raise ValueError(
            "A step cannot be traced within the scope of a distribution strategy; call this "
            "outside of `with strategy.scope():`."
        )
    scopes = LayerScopes()
    sources = [v.value for v in model.trainable_variables]
    # Updates of moving statistics, seeds and metrics end in the scope instead of the model.
    values = list(zip(model.trainable_variables, sources, strict=True))
    with keras.StatelessScope(values, collect_losses=True), tf.GradientTape() as tape:
        with scopes.recording(model):
            outputs = model(x, training=True)
        with scopes.loss():
            value = _loss(model, x, y, outputs, loss)
    with tf.name_scope("gradient_of_loss"):
        seed = tf.identity(tf.ones_like(value))
    gradients = tape.gradient(value, sources, output_gradients=seed)
    graph = tf.compat.v1.get_default_graph()
    forget_gradients(graph)  # nobody differentiates it once more
    return TracedStep(
        graph,
        [t for t in tf.nest.flatten((x, y)) if t is not None],
        seed,
        tf.nest.flatten([g for g in gradients if g is not None], expand_composites=True),
        scopes,
    )


def batch_tensors(name: str, value: Any) -> Any:
    """The arrays of a batch as tensors, floats in Keras's default dtype as `fit` makes them.

    Raises:
        TypeError: If `value` is a data set.
    """
    if isinstance(value, tf.data.Dataset | keras.utils.PyDataset):
        raise TypeError(
            f"{name} must be one batch, got a {type(value).__name__}. Take a batch from it, "
            "for example: x, y = next(iter(dataset))."
        )

    def convert(array: Any) -> tf.Tensor:
        tensor = tf.convert_to_tensor(np.asarray(array) if hasattr(array, "__array__") else array)
        return tf.cast(tensor, keras.config.floatx()) if tensor.dtype.is_floating else tensor

    return None if value is None else keras.tree.map_structure(convert, value)


def check_batch(model: keras.Model, x: Any, y: Any) -> None:
    """Raise a `ValueError` unless the batch fits the model."""
    tensors = keras.tree.flatten(x)
    # A subclassed model has no inputs known in advance, and a dict is matched by name.
    expected = None if isinstance(x, dict) else getattr(model, "inputs", None)
    if expected:
        if len(tensors) != len(expected):
            raise ValueError(
                f"x does not fit model {model.name!r}: {len(expected)} inputs expected, got "
                f"{len(tensors)}. Pass a list with an array for each input."
            )
        for tensor, spec in zip(tensors, expected, strict=True):
            _check_input(model.name, tensor, spec)
    rows = {t.shape[0] for t in [*tensors, *keras.tree.flatten(y)] if t is not None and t.shape}
    if 0 in rows:
        raise ValueError("x holds no samples. Pass one batch, samples along the first axis.")
    if len(rows) > 1:
        raise ValueError(
            f"x and y hold different numbers of samples: {sorted(rows)}. Pass one batch, "
            "the same samples in every array."
        )


def _check_input(model_name: str, tensor: tf.Tensor, spec: keras.KerasTensor) -> None:
    given, wanted = tuple(tensor.shape), tuple(spec.shape)
    fits = len(given) == len(wanted) and all(
        w is None or g == w for g, w in zip(given, wanted, strict=True)
    )
    # Keras adds or drops a last dimension of 1.
    may_adapt = abs(len(given) - len(wanted)) == 1 and (given + wanted)[-1] in (1, None)
    if not fits and not may_adapt:
        raise ValueError(
            f"x does not fit model {model_name!r}: input {spec.name!r} expects shape {wanted} "
            f"(None: any), got {given}. Pass a whole batch, samples along the first axis."
        )


def _loss(model: keras.Model, x: Any, y: Any, outputs: Any, loss: Loss | None) -> tf.Tensor:
    if loss is not None:
        return tf.convert_to_tensor(loss(y, outputs))
    if y is not None and model.compiled:
        return model.compute_loss(x=x, y=y, y_pred=outputs)
    squares = [
        tf.reduce_mean(tf.square(tf.cast(t, tf.float32))) for t in keras.tree.flatten(outputs)
    ]
    return tf.add_n(squares)
