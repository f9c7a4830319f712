"""Which Keras layers have a compressed form, and how the form is put on.

A compressed form is a mixin that overrides `call`. `compressed_class` mixes it
with the Keras class into a subclass that keeps the Keras name and module, so that
whatever is saved from a compressed model (configuration, weights, export) is that
of a plain Keras model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import keras
import tensorflow as tf

from bittrain_tf import ledger, recipes
from bittrain_tf.codecs import Codec, get_codec
from bittrain_tf.private import PART, register_as

KEEP, REBUILD = "keep", "rebuild"


class CompressedLayer:
    """Base of all compressed forms.

    Attributes:
        codec: The codec the layer's saved activations are kept in.
        stock_class: The Keras class this is a form of.
        choice: Whether readers of the output `"keep"` it or `"rebuild"` it from what the
            layer computed it from; None for whichever costs next to no time.
        front: What prunes the layer's activations, if anything does; see `layers.pruned`.
        prunes_rectified: Whether `prune_rectified` takes something.
        prunes_kept: Whether `prune_kept` does.
        prunes_normalized: Whether the form itself then says of which mean what it keeps is the
            deviation; other forms leave that to their inputs.
    """

    codec: Codec
    stock_class: type[keras.layers.Layer]
    choice: str | None = None
    front: type | None = None
    prunes_rectified = False
    prunes_kept = False
    prunes_normalized = False

    @property
    def supports_jit(self) -> bool:
        """False: the number of values kept depends on the data, which XLA cannot hold."""
        return False

    @supports_jit.setter
    def supports_jit(self, value: bool) -> None:
        vars(self)["supports_jit"] = value  # what `restore` brings back

    def trains_kernel(self) -> bool:
        """Whether a weight other than the bias is trained: its gradient needs the input.

        Tapes do not know: to TensorFlow a frozen Keras weight is still trainable.
        """
        return any(v is not self.bias for v in self.trainable_variables)

    def leave(
        self,
        y: tf.Tensor,
        fn: Callable[..., tf.Tensor],
        *inputs: tf.Tensor,
        kept: recipes.Recipe | None = None,
        rebuilt: bool = False,
        is_product: bool = False,
    ) -> tf.Tensor:
        """Attach to an output how its readers are to keep it; returns the output.

        Args:
            y: The output, `fn(*inputs)`.
            fn: A deterministic function of tensors.
            *inputs: Its arguments.
            kept: The recipe that keeps `y`; None to keep it as it is.
            rebuilt: Whether to rebuild `y` where no choice has been made, since its inputs
                are kept anyway.
            is_product: See `recipes.Derived`.
        """
        entries = ledger.current()
        if entries is not None:
            entries.offer(self, y, inputs, kept)
        if self.choice == REBUILD or (self.choice is None and rebuilt):
            kept = recipes.Derived(fn, inputs, sources_kept=rebuilt, is_product=is_product)
        return y if kept is None else recipes.attach(y, kept)

    def prune_rectified(self, y: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """A rectifier's output without what pruning takes from it, and how to take it again.

        Nothing, unless the layer's output is pruned; see `layers.pruned`.
        """
        return y, _unchanged

    def prune_kept(
        self, x: tf.Tensor, mean: tf.Tensor | None = None, inv_std: tf.Tensor | None = None
    ) -> None:
        """Have only the largest elements of a tensor kept, if what the layer keeps is pruned.

        Args:
            x: The tensor, not kept by anyone yet.
            mean: To be subtracted first, of a shape to be broadcast to `x`.
            inv_std: To be multiplied by then, likewise.
        """

    @staticmethod
    def skip_reason(layer: keras.layers.Layer) -> str | None:
        """Why this layer, by its options, stays stock; None if it does not."""
        return None


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of a layer, without those of the pruning of its activations."""
    part = vars(layer).get(PART)
    of_part = set() if part is None else {id(v) for v in part.variables}
    return [v for v in layer.variables if id(v) not in of_part]


def _unchanged(y: tf.Tensor) -> tf.Tensor:
    return y


_Form = TypeVar("_Form", bound=type[CompressedLayer])
_FORMS: dict[type[keras.layers.Layer], type[CompressedLayer]] = {}


def register_layer(*stock_classes: type[keras.layers.Layer]) -> Callable[[_Form], _Form]:
    """Class decorator: use the decorated mixin as the compressed form of `stock_classes`.

    Raises:
        TypeError: If a class is not a Keras layer, or the form not a `CompressedLayer`.
    """
    for stock in stock_classes:
        if not (isinstance(stock, type) and issubclass(stock, keras.layers.Layer)):
            raise TypeError(
                f"register_layer expects Keras layer classes, got {stock!r}. "
                "Use it as @register_layer(keras.layers.Conv2D)."
            )

    def register(form: _Form) -> _Form:
        if not (isinstance(form, type) and issubclass(form, CompressedLayer)):
            raise TypeError(
                f"register_layer decorates subclasses of CompressedLayer, got {form!r}."
            )
        for stock in stock_classes:
            _FORMS[stock] = form
        return form

    return register


def registered_layers() -> dict[type[keras.layers.Layer], type[CompressedLayer]]:
    """The registered forms by Keras class."""
    return dict(_FORMS)


def stock_class(layer: keras.layers.Layer) -> type[keras.layers.Layer]:
    """The class of `layer` without compression."""
    # Of the class: a layer of any make may have an attribute of that name.
    return type(layer).stock_class if isinstance(layer, CompressedLayer) else type(layer)


@functools.cache
def compressed_class(
    stock: type[keras.layers.Layer],
    codec: str,
    choice: str | None = None,
    form: type[CompressedLayer] | None = None,
    front: type | None = None,
) -> type[keras.layers.Layer]:
    """The compressed subclass of a Keras class.

    Args:
        stock: The Keras class.
        codec: See `CompressedLayer`, by name.
        choice: See `CompressedLayer`.
        form: The form; by default the one registered for the class.
        front: A mixin to be put in front of the form: one of `layers.pruned`.
    """
    cls = type(stock)(
        stock.__name__,
        (*([] if front is None else [front]), form or _form_of(stock), stock),
        {
            "__module__": _public_module(stock),
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "codec": get_codec(codec),
            "choice": choice,
            "stock_class": stock,
            "front": front,
        },
    )
    exported = cls.__module__ != stock.__module__
    own_name = getattr(front, "registered_name", None)
    stock_name = None if exported else keras.saving.get_registered_name(stock)
    register_as(cls, own_name or stock_name)
    return cls


def _public_module(stock: type[keras.layers.Layer]) -> str:
    """The module Keras writes into files for its own classes, the public one, which lasts."""
    for module in (keras.layers, keras):
        if getattr(module, stock.__name__, None) is stock:
            return module.__name__
    return stock.__module__


def skip_reason(layer: keras.layers.Layer) -> str | None:
    """Why `layer` cannot be put into compressed form; None if it can."""
    stock = stock_class(layer)
    form = _form_of(stock)
    if form is not None:
        return form.skip_reason(layer)
    for base in stock.__mro__[1:]:
        if base in _FORMS:
            return f"a {base.__name__} with a `call` of its own"
    return _KEEPS_NOTHING.get(stock, "no compressed form of this layer is registered")


def has_form(layer: keras.layers.Layer) -> bool:
    """Whether `layer` is of a class that has a form, or needs none."""
    stock = stock_class(layer)
    return _form_of(stock) is not None or stock in _KEEPS_NOTHING


def _form_of(stock: type[keras.layers.Layer]) -> type[CompressedLayer] | None:
    """The form of a class or, for a subclass that computes what its base does, of the base."""
    for base in stock.__mro__:
        if base in _FORMS:
            unchanged = all(
                getattr(stock, name, None) is getattr(base, name, None)
                for name in ("call", "__call__", "convolution_op")
            )
            return _FORMS[base] if unchanged else None
    return None


_KEEPS_NOTHING: dict[type[keras.layers.Layer], str] = {
    getattr(keras.layers, name): reason
    for reason, names in {
        "its gradient needs no activation": (
            "ActivityRegularization",
            "Average",
            "AveragePooling1D",
            "AveragePooling2D",
            "AveragePooling3D",
            "Embedding",
            "GlobalAveragePooling1D",
            "GlobalAveragePooling2D",
            "GlobalAveragePooling3D",
            "GaussianNoise",
            "Identity",
            "InputLayer",
            "Rescaling",
            "Subtract",
        ),
        "its gradient needs its dense output, which stock keeps once": ("ELU", "Softmax"),
    }.items()
    for name in names
}
