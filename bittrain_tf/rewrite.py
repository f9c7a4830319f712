"""Changing the classes of a model's layers, in place.

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
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras

from bittrain_tf import allocator
from bittrain_tf.layers import Rerun, compressed_class, has_form, skip_reason, stock_class
from bittrain_tf.layers.pruned import detach, front_of, frozen_class
from bittrain_tf.private import flatten_layers

Filters = str | Sequence[str] | Callable[[keras.layers.Layer], bool]

_jit_before: weakref.WeakKeyDictionary[keras.Model, bool] = weakref.WeakKeyDictionary()


def compressed_classes(
    model: keras.Model,
    codec: str,
    filters: Filters | None,
    choices: Mapping[keras.layers.Layer, str],
) -> dict[keras.layers.Layer, type[keras.layers.Layer]]:
    """The class that each layer of `model` is to have.

    Args:
        model: A built Keras model.
        codec: See `compress`.
        filters: See `compress`.
        choices: What the readers of a layer's output do; see `CompressedLayer.choice`.
    """
    layers = flatten_layers(model)
    chosen = choose(layers, filters)
    rerun = [] if filters is None else _rerun(layers, chosen, by_name=_is_list(filters))
    inside = {inner for layer in rerun for inner in flatten_layers(layer)}

    def class_of(layer: keras.layers.Layer) -> type[keras.layers.Layer]:
        stock = stock_class(layer)
        if layer in inside or layer not in chosen:
            return stock
        if layer in rerun:
            return compressed_class(stock, codec, form=Rerun)
        if skip_reason(layer):
            return stock
        # Pruning goes on, should a compressed model be compressed in another way.
        return compressed_class(stock, codec, choices.get(layer), front=front_of(layer))

    return {layer: class_of(layer) for layer in layers}


def _rerun(
    layers: Sequence[keras.layers.Layer], chosen: Sequence[keras.layers.Layer], *, by_name: bool
) -> list[keras.layers.Layer]:
    """Which of the chosen layers are run again as a whole: those that have no form.

    One made of other layers has to be asked for by its name. Cells and layers in wrappers
    are called by the layer around them, in loops of its own, and stay what they are.
    """
    around = [x for x in layers if isinstance(x, keras.layers.RNN | keras.layers.Wrapper)]
    called = {inner for layer in around for inner in flatten_layers(layer)}
    return [
        layer
        for layer in chosen
        if not has_form(layer) and layer not in called and (by_name or not flatten_layers(layer))
    ]


def restore(model: keras.Model) -> keras.Model:
    """Undo `compress`, and with it pruning: every layer has its Keras class again.

    Weights are untouched; thresholds of pruned activations are gone.

    Args:
        model: A Keras model, compressed or not.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is no Keras model.
    """
    check_is_model(model)
    switch(model, stock_classes(model))
    return model


def stock_classes(model: keras.Model) -> dict[keras.layers.Layer, type]:
    """The Keras class of every layer, whichever it has now."""
    return {layer: stock_class(layer) for layer in flatten_layers(model)}


def exported_classes(model: keras.Model) -> dict[keras.layers.Layer, type]:
    """The Keras class of every layer; of pruned outputs, with the thresholds as constants."""
    return {layer: frozen_class(layer) for layer in flatten_layers(model)}


def switch(model: keras.Model, classes: Mapping[keras.layers.Layer, type]) -> None:
    """Give the layers of `model` other classes, and have it traced anew."""
    changed = {layer: cls for layer, cls in classes.items() if type(layer) is not cls}
    if not changed:
        return
    _set_classes(changed)
    for layer in changed:
        if front_of(layer) is None:
            detach(layer)
    forget_traces(model)
    for trained in _models(model):
        _switch_jit(trained)


def forget_traces(model: keras.Model) -> None:
    """Have the model traced anew when it is next called in training or in inference."""
    had_traces = False
    for called in _models(model):
        for name in ("train_function", "test_function", "predict_function"):
            had_traces |= getattr(called, name) is not None
            setattr(called, name, None)
    if had_traces:
        allocator.return_freed()


def _models(model: keras.Model) -> list[keras.Model]:
    return [model, *(x for x in flatten_layers(model) if isinstance(x, keras.Model))]


@contextlib.contextmanager
def classes_for_tracing(
    model: keras.Model, classes: Mapping[keras.layers.Layer, type]
) -> Iterator[None]:
    """Other classes within the `with` block, what the model has been traced to staying valid."""
    before = {layer: type(layer) for layer in flatten_layers(model)}
    _set_classes(classes)
    try:
        yield
    finally:
        _set_classes(before)


def _set_classes(classes: Mapping[keras.layers.Layer, type]) -> None:
    for layer, cls in classes.items():
        # Past Keras's attribute tracking, which has nothing to track here.
        object.__setattr__(layer, "__class__", cls)


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
            stacklevel=4,  # the caller of `compress`
        )


def choose(
    layers: Sequence[keras.layers.Layer], filters: Filters | None
) -> Sequence[keras.layers.Layer]:
    """Which of `layers` the filters match; see `compress`."""
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
    elif _is_list(filters):
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


def _is_list(filters: Filters) -> bool:
    is_sequence = isinstance(filters, Sequence) and not isinstance(filters, str)
    return is_sequence and all(isinstance(name, str) for name in filters)


def _names(layers: Sequence[keras.layers.Layer]) -> str:
    names = [layer.name for layer in layers]
    shown = ", ".join(names[:20])
    return f"The model's layers: {shown}{', ...' if len(names) > 20 else ''}."


def check_is_model(model: object) -> None:
    """Raise unless `model` is a Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a keras.Model, got {type(model).__module__}.{type(model).__name__}. "
            "Models of tf_keras (Keras 2) and other libraries are not supported."
        )


def check_model(model: object) -> None:
    """Raise unless `model` is a built Keras model."""
    check_is_model(model)
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} is not built yet, so its layers are not known. Call it on a "
            "batch, call model.build(input_shape), or start it with a keras.Input."
        )
