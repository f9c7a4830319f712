"""Turning compression on and off for a model, in place.

A layer is rewritten by giving the object the compressed subclass of its class,
and restored by giving it the class back. Layers, variables, names and optimizer
state stay the very same objects, so shared layers, nested models, custom
`train_step`s and models compiled and half trained need no special case.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import keras

from bittrain_tf.codecs import get_codec
from bittrain_tf.layers import compressed_class, skip_reason, stock_class
from bittrain_tf.private import flatten_layers

Filters = str | Sequence[str] | Callable[[keras.layers.Layer], bool]

_jit_before: weakref.WeakKeyDictionary[keras.Model, bool] = weakref.WeakKeyDictionary()


def compress(
    model: keras.Model,
    *,
    memory_budget: float | int | None = None,
    time_budget: float | None = None,
    codec: str = "bitmap",
    filters: Filters | None = None,
) -> keras.Model:
    """Make a model keep its activations for the backward pass in less memory.

    Outputs and gradients stay what they are. The model is changed in place and can
    be trained as before: `fit`, `train_on_batch`, `tf.GradientTape`. Files saved from
    it are plain Keras files. Layers that cannot be compressed stay as they are; see
    `bittrain_tf.report`. A second call with the same options changes nothing.

    Args:
        model: A built Keras model, compiled or not.
        memory_budget: Reserved; must be None.
        time_budget: Reserved; must be None.
        codec: How sparse activations are kept: `"bitmap"` (1 bit an element and the
            non-zeros) or `"dense"` (as they are, for comparison).
        filters: Which layers to compress: a regular expression searched in the layer
            names, a list of names, or a function of the layer. All by default.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is no Keras model, or `filters` of no known kind.
        ValueError: If the model is not built, the codec unknown, the filter matches
            nothing or an argument is out of range.
        NotImplementedError: If a budget is given.
    """
    check_model(model)
    get_codec(codec)
    _check_budgets(memory_budget, time_budget)
    layers = flatten_layers(model)
    chosen = _choose(layers, filters)
    classes = {
        id(layer): stock_class(layer)
        if skip_reason(layer) is not None or layer not in chosen
        else compressed_class(stock_class(layer), codec)
        for layer in layers
    }
    if all(classes[id(layer)] is stock_class(layer) for layer in layers):
        warnings.warn(
            f"No layer of model {model.name!r} can be compressed; "
            "bittrain_tf.report(model) says why for each.",
            stacklevel=2,
        )
    _switch(model, {layer: classes[id(layer)] for layer in layers})
    return model


def restore(model: keras.Model) -> keras.Model:
    """Undo `compress`: every layer has its Keras class again. Weights are untouched.

    Args:
        model: A Keras model, compressed or not.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is no Keras model.
    """
    _check_is_model(model)
    _switch(model, {layer: stock_class(layer) for layer in flatten_layers(model)})
    return model


@contextlib.contextmanager
def compressed(model: keras.Model, **options: object) -> Iterator[keras.Model]:
    """`compress` within a `with` block; afterwards the model is what it was before.

    Args:
        model: See `compress`.
        **options: See `compress`.
    """
    before = {layer: type(layer) for layer in flatten_layers(model)} if _is_model(model) else {}
    try:
        yield compress(model, **options)
    finally:
        _switch(model, before)


def _switch(model: keras.Model, classes: dict[keras.layers.Layer, type]) -> None:
    changed = [layer for layer, cls in classes.items() if type(layer) is not cls]
    for layer in changed:
        # Past Keras's attribute tracking, which has nothing to track here.
        object.__setattr__(layer, "__class__", classes[layer])
    if not changed:
        return
    models = [model, *(layer for layer in classes if isinstance(layer, keras.Model))]
    for trained in models:
        trained.train_function = None  # traced from the old classes; Keras builds it anew
    for trained in models:
        _switch_jit(trained)


def _switch_jit(model: keras.Model) -> None:
    """XLA cannot hold tensors whose length depends on the data: off while compressed."""
    if not model.compiled:
        return
    if all(layer.supports_jit for layer in flatten_layers(model)):
        if model in _jit_before:
            model.jit_compile = _jit_before.pop(model)
    elif model.jit_compile:
        _jit_before[model] = True
        model.jit_compile = False
        warnings.warn(
            f"Model {model.name!r} is compiled with jit_compile=True, which compressed layers "
            "do not support: it trains with jit_compile=False until bittrain_tf.restore(model).",
            stacklevel=4,
        )


def _choose(
    layers: Sequence[keras.layers.Layer], filters: Filters | None
) -> Sequence[keras.layers.Layer]:
    if filters is None:
        return layers
    if isinstance(filters, str):
        try:
            pattern = re.compile(filters)
        except re.error as error:
            raise ValueError(f"filters={filters!r} is no regular expression: {error}.") from error
        chosen = [layer for layer in layers if pattern.search(layer.name)]
    elif callable(filters):
        chosen = [layer for layer in layers if filters(layer)]
    elif isinstance(filters, Sequence) and all(isinstance(name, str) for name in filters):
        names = {layer.name for layer in layers}
        unknown = [name for name in filters if name not in names]
        if unknown:
            raise ValueError(
                f"filters names layers that are not there: {unknown}. {_names(layers)}"
            )
        chosen = [layer for layer in layers if layer.name in filters]
    else:
        raise TypeError(
            "filters must be a regular expression, a list of layer names or a function of the "
            f"layer, got {filters!r}."
        )
    if not chosen:
        raise ValueError(f"filters={filters!r} matches no layer. {_names(layers)}")
    return chosen


def _names(layers: Sequence[keras.layers.Layer]) -> str:
    names = [layer.name for layer in layers]
    shown = ", ".join(names[:20])
    return f"The model's layers: {shown}{', ...' if len(names) > 20 else ''}."


def _is_model(model: object) -> bool:
    return isinstance(model, keras.Model)


def _check_is_model(model: object) -> None:
    if not _is_model(model):
        raise TypeError(
            f"Expected a keras.Model, got {type(model).__module__}.{type(model).__name__}. "
            "Models of tf_keras (Keras 2) and other libraries are not supported."
        )


def check_model(model: object) -> None:
    """Raise unless `model` is a built Keras model."""
    _check_is_model(model)
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built yet, so its layers are not known. Call it on a "
            "batch, call model.build(input_shape), or start it with a keras.Input."
        )


def _check_budgets(memory_budget: float | int | None, time_budget: float | None) -> None:
    if memory_budget is not None:
        is_share = isinstance(memory_budget, float) and 0 < memory_budget <= 1
        is_bytes = (
            _is_number(memory_budget) and isinstance(memory_budget, int) and memory_budget > 0
        )
        if not (is_share or is_bytes):
            raise ValueError(
                "memory_budget must be a float in (0, 1], a share of what the stock model keeps, "
                f"or a positive int, bytes; got {memory_budget!r}."
            )
    if time_budget is not None and not (_is_number(time_budget) and time_budget >= 1):
        raise ValueError(
            "time_budget is the step time allowed as a ratio to the stock model's, 1 or more; "
            f"got {time_budget!r}."
        )
    if memory_budget is not None or time_budget is not None:
        raise NotImplementedError(
            "Budgets need activations to be rebuilt by recomputation, which this version does "
            "not do; leave memory_budget and time_budget out to get the lossless bitmap."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
