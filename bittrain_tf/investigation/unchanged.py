"""A model that is trained, frozen and probed, and comes back as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras

from bittrain_tf.private import flatten_layers


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Whatever the `with` block does to a model is undone, also after an exception.

    That is: values of weights, seeds, metrics and optimizer states, what is trainable,
    and the model's own attributes (optimizer, functions traced, history).
    """
    optimizers = optimizers_of(model)
    variables = [
        *model.variables,
        *model.metrics_variables,
        *(v for optimizer in optimizers.values() for v in optimizer.variables),
    ]
    values = [v.numpy().copy() for v in variables]
    attributes = dict(vars(model))
    # A layer passes its flag on to the layers inside, of which there are more in the outer one.
    layers = sorted([model, *flatten_layers(model)], key=lambda x: -len(flatten_layers(x)))
    flags = [(layer, layer.trainable) for layer in layers]
    variable_flags = [(v, v.trainable) for v in model.variables]
    try:
        yield
    finally:
        # Past Keras's tracking, which would take these for attributes newly set.
        for name in vars(model).keys() - attributes.keys():
            del vars(model)[name]
        vars(model).update(attributes)
        for layer, flag in flags:
            layer.trainable = flag
        for variable, flag in variable_flags:
            variable.trainable = flag
        model.reset_metrics()  # also those that did not exist before
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """The optimizers of a model, by attribute; a `train_step` may use several."""
    return {k: v for k, v in vars(model).items() if isinstance(v, keras.optimizers.Optimizer)}


def copy_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new optimizer with the same settings, which has seen no variables yet."""
    return type(optimizer).from_config(optimizer.get_config())


def train_with_copies(model: keras.Model) -> None:
    """Have a model train with copies of its optimizers, at the point where these are.

    What an optimizer has built cannot be undone, so that it is not used at all.
    """
    for name, optimizer in optimizers_of(model).items():
        copy = copy_of(optimizer)
        if optimizer.built:
            copy.build(model.trainable_variables)
            # Some of those that it was built for may be frozen by now.
            values = {v.path: v.value for v in optimizer.variables}
            for variable in copy.variables:
                if variable.path in values:
                    variable.assign(values[variable.path])
        setattr(model, name, copy)
    model.train_function = None  # traced with the other optimizer
