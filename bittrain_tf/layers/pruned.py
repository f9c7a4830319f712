"""Pruned activations: what is put in front of a compressed form, one class a way of pruning.

* What a layer keeps (`PrunedKept`): its output stays that of the stock layer, but gradients
  are computed from the largest elements alone of what it keeps, as in Back Razor (Jiang et
  al., NeurIPS 2022).
* What a layer puts out, so that the model itself computes with what is left of it and its
  gradients are exact. The mask that the gradient of a rectifier needs is the bitmap as well
  (`PrunedRectifier`); elsewhere there is one more mask (`PrunedOutput`).
* What a batch normalization takes in and, by the same mask, what it puts out
  (`DoublyMasked`), as in BitTrain (arXiv 2110.15362): normalizing alone would make the zeros
  something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.codecs import Codec, mask
from bittrain_tf.layers.activation import is_rectifier
from bittrain_tf.layers.registry import CompressedLayer, compressed_class, stock_class
from bittrain_tf.layers.rerun import Rerun
from bittrain_tf.private import PART, add_part, recorded, recording, remove_part
from bittrain_tf.pruning.quantile import CHANNEL
from bittrain_tf.pruning.state import FORWARD, Pruning


def _without(x: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """`x` with zeros for what does not exceed a threshold (a NaN is not to be hidden so)."""
    return tf.where(tf.abs(x) <= threshold, tf.zeros([], x.dtype), x)


def _without_positive(y: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    """`_without` for a tensor without negative elements: one of its size less in memory."""
    return tf.where(y <= threshold, tf.zeros([], y.dtype), y)


class _Front(CompressedLayer):
    """What comes before a compressed form.

    Attributes:
        activation_pruning: What is pruned; the attribute `private.PART`.
    """

    activation_pruning: Pruning

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "stock_class" not in vars(cls) or not hasattr(cls, "_call_pruned"):
            return
        call = super(cls.front, cls).call

        # Keras reads from the signature which arguments the layer takes.
        @functools.wraps(call)
        def pruned(self: _Front, *args: Any, **kwargs: Any) -> Any:
            return self._call_pruned(functools.partial(call, self), *args, **kwargs)

        cls.call = pruned


class PrunedKept(_Front):
    """Of the tensors a layer keeps, the largest elements."""

    prunes_kept = True

    def _call_pruned(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not recording():
            return call(*args, **kwargs)
        if not self.prunes_normalized:
            for x in keras.tree.flatten((args, kwargs)):
                if isinstance(x, tf.Tensor) and x.dtype.is_floating:
                    self.prune_kept(x)
        outputs = call(*args, **kwargs)
        self.activation_pruning.advance()
        return outputs

    def prune_kept(
        self, x: tf.Tensor, mean: tf.Tensor | None = None, inv_std: tf.Tensor | None = None
    ) -> None:
        recipe = recipes.of(x)
        # One derived from others is rebuilt from what is kept, and pruned, of those.
        itself = recipe is None or (type(recipe) is recipes.Encoded and not recipe.free)
        if itself and recorded(x):
            recipes.attach(x, _Largest(self.codec, self.activation_pruning, mean, inv_std))


class _Largest(recipes.Encoded):
    """Keep the largest elements of a tensor, in a codec.

    Args:
        codec: The codec.
        pruning: What says how many.
        mean: See `CompressedLayer.prune_kept`.
        inv_std: Likewise.
    """

    def __init__(
        self,
        codec: Codec,
        pruning: Pruning,
        mean: tf.Tensor | None,
        inv_std: tf.Tensor | None,
    ) -> None:
        super().__init__(codec)
        self._pruning, self._mean, self._inv_std = pruning, mean, inv_std

    def _before(self, x: tf.Tensor) -> tf.Tensor:
        if self._mean is not None:
            x = x - tf.cast(self._mean, x.dtype)
        if self._inv_std is not None:
            x = x * tf.cast(self._inv_std, x.dtype)
        return _without(x, self._pruning.kept_threshold(x))

    def _after(self, decoded: tf.Tensor) -> tf.Tensor:
        if self._inv_std is not None:
            decoded = decoded / tf.cast(self._inv_std, decoded.dtype)
        if self._mean is not None:
            decoded = decoded + tf.cast(self._mean, decoded.dtype)
        return decoded


@keras.saving.register_keras_serializable("bittrain_tf", "Pruned")
class _StoredPruning(_Front):
    """Pruning that changes what a model computes, so that its files must tell of it.

    Files call the layers by the name that this class is registered under.
    """

    registered_name = "bittrain_tf>Pruned"

    def get_config(self) -> dict[str, Any]:
        stock = self.stock_class
        module = type(self).__module__
        name = keras.saving.get_registered_name(stock)
        layer = {
            "module": module,
            "class_name": stock.__name__,
            "config": keras.saving.serialize_keras_object(super().get_config()),
            "registered_name": None if name == stock.__name__ else name,
        }
        return {"layer": layer, "pruning": self.activation_pruning.get_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> keras.layers.Layer:
        """The layer, compressed and pruned, its thresholds yet to be loaded."""
        layer = keras.saving.deserialize_keras_object(config["layer"])
        attach(layer, Pruning(**config["pruning"]))
        return layer

    def _prune(
        self, y: tf.Tensor, without: Callable[..., tf.Tensor] = _without
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """A tensor without its smallest elements, and a function to do that again."""
        threshold = self.activation_pruning.output_threshold(
            tf.stop_gradient(y), training=recording()
        )
        again = functools.partial(without, threshold=threshold)
        return again(y), again

    def _prune_between(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor | None]:
        """`x` without its smallest elements, with that gradient; and the packed mask if kept."""
        if not recorded(x):
            y, _ = self._prune(x)
            return (recipes.attach(y, recipes.Encoded(self.codec)) if recording() else y), None
        y, again = self._prune(tf.stop_gradient(x))
        packed = mask.pack(tf.not_equal(y, 0))
        y = self._masked(y, x, packed)
        kept = recipes.Encoded(self.codec, support=packed)
        return self.leave(y, again, x, kept=kept, rebuilt=recipes.is_free(x)), packed

    def _masked(self, y: tf.Tensor, x: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
        """`y`, which is `x` where a mask is set and else zero, with that gradient."""
        kept, y = recipes.keep_mask(packed, tf.stop_gradient(y))
        return recipes.with_gradient(
            y, [x], [kept], lambda dy, packed: (mask.multiply(dy, packed),)
        )


class PrunedRectifier(_StoredPruning):
    """The output of a layer that ends in a rectifier; the form prunes it."""

    prunes_rectified = True

    def prune_rectified(self, y: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return self._prune(y, _without_positive)


class PrunedOutput(_StoredPruning):
    """The output of any other layer."""

    def _call_pruned(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        y = call(*args, **kwargs)
        single = isinstance(y, tf.Tensor) and y.dtype.is_floating
        return self._prune_between(y)[0] if single else y


class DoublyMasked(_StoredPruning):
    """The input of a batch normalization, and its output where the input was pruned."""

    def _call_pruned(
        self, call: Callable[..., Any], inputs: tf.Tensor, *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        x, packed = self._prune_between(inputs)
        y = call(x, *args, **kwargs)
        if packed is None:
            return tf.where(tf.equal(x, 0), tf.zeros([], y.dtype), y)

        def again(y: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
            return mask.choose(y, packed, on=1.0, off=0.0)

        z = self._masked(again(tf.stop_gradient(y), packed), y, packed)
        return self.leave(z, again, y, packed, rebuilt=recipes.is_free(y))


def front_for(layer: keras.layers.Layer, mode: str) -> type[CompressedLayer]:
    """What prunes a compressed layer in a mode."""
    if mode != FORWARD:
        return PrunedKept
    if isinstance(layer, keras.layers.BatchNormalization):
        return DoublyMasked
    return PrunedRectifier if ends_in_rectifier(layer) else PrunedOutput


def ends_in_rectifier(layer: keras.layers.Layer) -> bool:
    """Whether a layer's output is that of ReLU or ReLU6."""
    if isinstance(layer, keras.layers.ReLU):
        plain = layer.threshold == 0 and layer.negative_slope == 0
        return plain and layer.max_value in (None, 6)
    return is_rectifier(getattr(layer, "activation", None))


def front_of(layer: keras.layers.Layer) -> type[CompressedLayer] | None:
    """What prunes a layer now."""
    return layer.front if isinstance(layer, CompressedLayer) else None


def prunable(layer: keras.layers.Layer) -> bool:
    """Whether a layer is compressed in a form that can be pruned."""
    return isinstance(layer, CompressedLayer) and not isinstance(layer, Rerun)


def attach(layer: keras.layers.Layer, pruning: Pruning) -> None:
    """Have a layer's activations pruned."""
    detach(layer)
    codec, choice = ("bitmap", None)
    if isinstance(layer, CompressedLayer):
        codec, choice = type(layer).codec.name, layer.choice
    front = front_for(layer, pruning.mode)
    cls = compressed_class(stock_class(layer), codec, choice, front=front)
    if not pruning.built and not (pruning.mode == FORWARD and pruning.per == CHANNEL):
        pruning.build()  # else once the number of channels is seen
    add_part(layer, pruning)
    # Past Keras's attribute tracking, which has nothing to track here.
    object.__setattr__(layer, "__class__", cls)


def detach(layer: keras.layers.Layer) -> None:
    """Undo `attach`; the layer stays compressed."""
    if PART not in vars(layer):
        return
    remove_part(layer)
    if front_of(layer) is not None:
        cls = compressed_class(stock_class(layer), type(layer).codec.name, layer.choice)
        object.__setattr__(layer, "__class__", cls)


class _Frozen:
    """In front of a stock layer: its output pruned at thresholds that no longer change."""

    stock_class: type[keras.layers.Layer]
    _thresholds: np.ndarray

    def get_config(self) -> dict[str, Any]:
        return {"layer": super().get_config(), "thresholds": _thresholds_of(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> keras.layers.Layer:
        layer = cls.stock_class.from_config(config["layer"])
        object.__setattr__(layer, "_thresholds", config["thresholds"])
        object.__setattr__(layer, "__class__", cls)
        return layer


@functools.cache
def _frozen_class(stock: type[keras.layers.Layer]) -> type[keras.layers.Layer]:
    masked_before = issubclass(stock, keras.layers.BatchNormalization)

    @functools.wraps(stock.call)
    def call(self: Any, inputs: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        threshold = tf.constant(_thresholds_of(self))
        if not masked_before:
            return _without(stock.call(self, inputs, *args, **kwargs), threshold)
        x = _without(inputs, threshold)
        y = stock.call(self, x, *args, **kwargs)
        return tf.where(tf.equal(x, 0), tf.zeros([], y.dtype), y)

    return type(stock)(stock.__name__, (_Frozen, stock), {"call": call, "stock_class": stock})


def _thresholds_of(layer: keras.layers.Layer) -> np.ndarray:
    pruning = vars(layer).get(PART)
    if pruning is None:
        return vars(layer)["_thresholds"]
    with tf.init_scope():  # their values now, whatever is being traced
        thresholds = pruning.thresholds.numpy()
    return thresholds if pruning.per == CHANNEL else thresholds[0]


def frozen_class(layer: keras.layers.Layer) -> type[keras.layers.Layer]:
    """The class of a layer without compression, but pruned as inference prunes it."""
    pruning = vars(layer).get(PART)
    if pruning is None or pruning.mode != FORWARD or not pruning.built:
        return stock_class(layer)
    return _frozen_class(stock_class(layer))
