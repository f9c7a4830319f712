"""Which layer and which codec an operation of a traced model belongs to.

Keras opens a name scope for every call of a layer, but TensorFlow appends numbers
to make them unique, and `dense_1` may then be the second scope of `dense` or the
first of `dense_1`. So the scopes are recorded while the model is traced.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf.analysis.kept import MASK
from bittrain_tf.codecs import get_codec
from bittrain_tf.private import flatten_layers

LOSS = "(loss)"
_BACKWARD = ("gradient_tape/", "backward/")


class LayerScopes:
    """The name scopes that the layers of a model opened in one trace."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}
        self._calling: list[str] = []

    @contextlib.contextmanager
    def recording(self, model: keras.Model) -> Iterator[None]:
        """Record the scope of every layer of `model` that is called in the `with` block."""
        layers = [model, *flatten_layers(model)]
        before = [vars(layer).get("call") for layer in layers]
        for layer in layers:
            # Past Keras's attribute tracking, as this is no part of the layer's state.
            object.__setattr__(layer, "call", self._recorded(layer, layer is model))
        try:
            yield
        finally:
            for layer, call in zip(layers, before, strict=True):
                if call is None:
                    object.__delattr__(layer, "call")
                else:
                    object.__setattr__(layer, "call", call)

    @contextlib.contextmanager
    def loss(self) -> Iterator[None]:
        """Operations created in the `with` block belong to the loss."""
        with tf.name_scope("loss"):
            self._labels[tf.get_current_name_scope()] = LOSS
            yield

    def layer_of(self, operation: str) -> str:
        """The layer an operation was created for, `"outer/inner"` if nested.

        Args:
            operation: Name of a forward operation, or of a gradient operation, which
                carries the scope of the layer it goes back through.

        Returns:
            The name; empty if no layer made it.
        """
        scope, _, _ = _without_prefixes(operation).rpartition("/")
        while scope:
            # Scopes opened again for the backward pass get numbers of their own.
            for candidate in (scope, re.sub(r"_\d+$", "", scope)):
                if candidate in self._labels:
                    return self._labels[candidate]
            scope, _, _ = scope.rpartition("/")
        return ""

    def _recorded(self, layer: keras.layers.Layer, is_root: bool) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not is_root:
                self._calling.append(layer.name)
            try:
                label = "/".join(self._calling) or layer.name
                self._labels.setdefault(tf.get_current_name_scope(), label)
                return call(*args, **kwargs)
            finally:
                if not is_root:
                    self._calling.pop()

        return recorded


def codec_of(operation: str) -> tuple[str, str] | None:
    """Whether an operation is part of a codec's work.

    Args:
        operation: Its name.

    Returns:
        `"encode"` or `"decode"`, and the name of the codec; None if it is neither.
    """
    for scope in operation.split("/")[:-1]:
        verb, _, rest = scope.partition("_")
        if verb in ("encode", "decode"):
            # Layers have names like these too, so only codecs that exist count.
            for name in (rest, re.sub(r"_\d+$", "", rest)):
                if _is_codec(name):
                    return verb, name
    return None


def _is_codec(name: str) -> bool:
    if name == MASK:
        return True
    try:
        get_codec(name)
    except ValueError:
        return False
    return True


def _without_prefixes(operation: str) -> str:
    while operation.startswith(_BACKWARD):
        _, _, operation = operation.partition("/")
    return operation
