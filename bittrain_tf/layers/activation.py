"""Activations: ReLU and its relatives, as layers and as the `activation=` of other layers.

What stock Keras keeps for the gradient, and what is kept here:

* rectifiers (ReLU, ReLU6, any `max_value` and `threshold`): the dense output;
  here one bit an element, and the output can be kept by its readers as a bitmap.
* LeakyReLU: the dense input; here one bit an element.
* compositions (GELU, hard swish, PReLU, ...): several dense intermediates; here
  the input only, from which the rest is computed again.
* SiLU, softplus, softsign: the dense input, and the dense output for the next layer;
  here neither, where the input can be had from what is kept anyway.
* sigmoid, tanh, softmax, ELU, ...: the dense output, often shared with the next
  layer. Nothing lossless is smaller, so these stay stock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.backward.vjp import vjp
from bittrain_tf.codecs import mask
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded, recording

Activation = Callable[[tf.Tensor], tf.Tensor]


def activate(fn: Activation | None, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    """`fn(x)`, keeping as little as its gradient needs.

    Args:
        fn: A Keras or TensorFlow activation function, or any other callable, which is
            called as it is.
        x: Floating-point tensor.
        layer: The layer it is a part of, which says how its readers keep the output.
    """
    if fn is None:
        return x
    compressed = _COMPRESSED.get(fn) if recording() and x.dtype.is_floating else None
    if compressed is not None:
        layer.prune_kept(x)
        return compressed(fn, x, layer)
    return layer.prune_rectified(fn(x))[0] if is_rectifier(fn) else fn(x)


def activate_linear(
    fn: Activation | None,
    linear: Callable[..., tf.Tensor],
    *inputs: tf.Tensor,
    layer: CompressedLayer,
    cheap: bool = False,
) -> tf.Tensor:
    """`fn(linear(*inputs))`, its inputs kept by their recipes, if the first has one.

    A rectifier follows its convolution at once: TensorFlow runs the two and the bias
    between them as one operation, unless a gradient's boundary separates them.

    Args:
        fn: See `activate`.
        linear: A deterministic function of the inputs, without variables.
        *inputs: Its arguments.
        layer: See `activate`.
        cheap: Whether to compute the output again, where no choice has been made, rather
            than have its readers keep it.
    """
    rectifier = _RECTIFIERS.get(fn)
    if rectifier is None:
        y = recipes.consume(linear, *inputs, linear=True)
        layer.leave(y, linear, *inputs, rebuilt=cheap, is_product=True)
        return activate(fn, y, layer)
    kept = [recipes.keep(x) for x in inputs]
    y, again = layer.prune_rectified(fn(linear(*recipes.detach(inputs, kept))))
    passes, y = recipes.keep_mask(rectifier.pack(y), y)

    def gradient(dy: tf.Tensor, *rebuilt: tf.Tensor) -> list[tf.Tensor | None]:
        *inputs, passes = rebuilt
        return recipes.differentiate_linear(linear, mask.multiply(dy, passes), *inputs)

    y = recipes.with_gradient(y, inputs, [*kept, passes], gradient)
    return layer.leave(
        y,
        lambda *inputs: again(fn(linear(*inputs))),
        *inputs,
        kept=recipes.Encoded(layer.codec, support=passes.parts[0]),
        rebuilt=cheap,
        is_product=True,
    )


class _Rectifier(NamedTuple):
    """A function whose derivative is 1 where its output lies between 0 and `limit`, else 0.

    Attributes:
        limit: The largest output.
        pack: From the output, the packed mask of where the derivative is 1.
    """

    limit: float
    pack: Callable[[tf.Tensor], tf.Tensor]


_RELU = _Rectifier(math.inf, mask.pack_positive)
_RELU6 = _Rectifier(6.0, mask.pack_within_six)


def rectify(
    fn: Activation, rectifier: _Rectifier, x: tf.Tensor, layer: CompressedLayer
) -> tf.Tensor:
    """`fn(x)`, `fn` being that rectifier."""
    if not recorded(x):
        return recipes.attach(layer.prune_rectified(fn(x))[0], recipes.Encoded(layer.codec))
    recipe = recipes.of(x)
    alone = recipe is None or layer.prunes_rectified
    together = None if alone else recipe.rectified(rectifier.limit)
    if together is not None:
        y, passes, again, source = together
        kept = recipes.Encoded(layer.codec, support=passes)
        return layer.leave(y, again, source, kept=kept, rebuilt=True)
    if not layer.prunes_rectified:
        y = fn(tf.stop_gradient(x))
        return _with_mask(fn, y, rectifier.pack(y), x, layer)
    y, again = layer.prune_rectified(fn(tf.stop_gradient(x)))
    passes = rectifier.pack(y)
    if rectifier is not _RELU:  # whose mask leaves out what is cut off
        return _with_mask(lambda x: again(fn(x)), y, passes, x, layer)
    # By the mask, not by the threshold: `x` rebuilt may be rounded to its other side.
    return _with_mask(lambda x: mask.choose(fn(x), passes, on=1.0, off=0.0), y, passes, x, layer)


def _with_mask(
    fn: Activation, y: tf.Tensor, passes: tf.Tensor, x: tf.Tensor, layer: CompressedLayer
) -> tf.Tensor:
    kept, y = recipes.keep_mask(passes, y)
    y = recipes.with_gradient(y, [x], [kept], lambda dy, passes: (mask.multiply(dy, passes),))
    # Where the input can be had again from what is kept anyway, the output can, too.
    encoded = recipes.Encoded(layer.codec, support=kept.parts[0])
    return layer.leave(y, fn, x, kept=encoded, rebuilt=recipes.is_free(x))


def _relu(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    return rectify(fn, _RELU, x, layer)


def _relu6(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    return rectify(fn, _RELU6, x, layer)


def _hard_sigmoid(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    # Keras's own definition, with a ReLU6 that keeps a mask instead of its output.
    return _relu6(tf.nn.relu6, x + 3.0, layer) / 6.0


def _sparse(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    """For functions whose derivative is 0 or 1 at every point."""
    if not recorded(x):
        return recipes.attach(fn(x), recipes.Encoded(layer.codec))
    y = fn(tf.stop_gradient(x))
    (derivative,) = vjp(fn, [tf.stop_gradient(x)], tf.ones_like(y))
    return _with_mask(fn, y, mask.pack(tf.not_equal(derivative, 0)), x, layer)


def _leaky_relu(
    fn: Activation, x: tf.Tensor, layer: CompressedLayer, negative_slope: float = 0.2
) -> tf.Tensor:
    if not recorded(x):
        return fn(x)
    kept, y = recipes.keep_mask(mask.pack_positive(x), fn(tf.stop_gradient(x)))
    slope = float(np.float32(negative_slope))  # of the precision TensorFlow's operation takes
    y = recipes.with_gradient(
        y, [x], [kept], lambda dy, passes: (mask.choose(dy, passes, on=1.0, off=slope),)
    )
    return layer.leave(y, fn, x, rebuilt=recipes.is_free(x))


def _composed(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    if not recorded(x):
        return fn(x)
    return layer.leave(recipes.keep_inputs(fn, x), fn, x, rebuilt=recipes.is_free(x))


def _by_input(fn: Activation, x: tf.Tensor, layer: CompressedLayer) -> tf.Tensor:
    """For functions of which stock keeps the input, as it is."""
    return fn(x) if recipes.of(x) is None and layer.choice is None else _composed(fn, x, layer)


_RECTIFIERS: dict[Callable[..., tf.Tensor] | None, _Rectifier] = {
    keras.activations.relu: _RELU,
    keras.ops.relu: _RELU,
    tf.nn.relu: _RELU,
    keras.activations.relu6: _RELU6,
    keras.ops.relu6: _RELU6,
    tf.nn.relu6: _RELU6,
}


def is_rectifier(fn: Activation | None) -> bool:
    """Whether an activation function is ReLU or ReLU6."""
    return isinstance(fn, Hashable) and fn in _RECTIFIERS


_COMPRESSED: dict[
    Callable[..., tf.Tensor], Callable[[Activation, tf.Tensor, CompressedLayer], tf.Tensor]
] = {
    **{fn: _relu if kind is _RELU else _relu6 for fn, kind in _RECTIFIERS.items()},
    keras.activations.leaky_relu: _leaky_relu,
    keras.ops.leaky_relu: _leaky_relu,
    tf.nn.leaky_relu: _leaky_relu,
    keras.activations.hard_sigmoid: _hard_sigmoid,
    keras.activations.hard_shrink: _sparse,
    keras.activations.soft_shrink: _sparse,
    keras.activations.hard_tanh: _sparse,
    keras.activations.celu: _composed,
    keras.activations.gelu: _composed,
    tf.nn.gelu: _composed,
    keras.activations.glu: _composed,
    keras.activations.hard_silu: _composed,
    keras.activations.log_sigmoid: _composed,
    keras.activations.mish: _composed,
    keras.activations.sparse_plus: _composed,
    keras.activations.silu: _by_input,
    keras.activations.softplus: _by_input,
    keras.activations.softsign: _by_input,
    keras.activations.squareplus: _composed,
    keras.activations.tanh_shrink: _composed,
}


@register_layer(keras.layers.Activation)
class CompressedActivation(CompressedLayer):
    """`Activation`: by its function."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return activate(self.activation, inputs, self)

    @staticmethod
    def skip_reason(layer: keras.layers.Layer) -> str | None:
        if layer.activation in _COMPRESSED:
            return None
        name = getattr(layer.activation, "__name__", layer.activation)
        return f"nothing smaller than what stock keeps would do for {name}"


@register_layer(keras.layers.ReLU)
class CompressedReLU(CompressedLayer):
    """`ReLU`, with all its arguments."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        fn = functools.partial(
            keras.activations.relu,
            negative_slope=self.negative_slope,
            max_value=self.max_value,
            threshold=self.threshold,
        )
        plain = self.threshold == 0 and self.negative_slope == 0
        if not recording() or not inputs.dtype.is_floating:
            return self.prune_rectified(fn(inputs))[0]
        if plain and self.max_value is None:
            return _relu(fn, inputs, self)
        if plain and self.max_value == 6:
            return _relu6(fn, inputs, self)
        if self.negative_slope == 0:
            return _sparse(fn, inputs, self)
        if self.max_value is None and self.threshold == 0:
            return _leaky_relu(fn, inputs, self, self.negative_slope)
        return _composed(fn, inputs, self)


@register_layer(keras.layers.LeakyReLU)
class CompressedLeakyReLU(CompressedLayer):
    """`LeakyReLU`: the sign of the input, one bit an element."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        slope = self.negative_slope
        fn = functools.partial(keras.activations.leaky_relu, negative_slope=slope)
        return _leaky_relu(fn, inputs, self, slope) if recording() else fn(inputs)


@register_layer(keras.layers.PReLU)
class CompressedPReLU(CompressedLayer):
    """`PReLU`: its input, once."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        alpha = tf.convert_to_tensor(self.alpha)
        if not recorded(inputs, alpha):
            return super().call(inputs)

        def prelu(x: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
            return keras.activations.relu(x) + -alpha * keras.activations.relu(-x)

        y = recipes.keep_inputs(prelu, inputs, alpha)
        return self.leave(y, prelu, inputs, alpha, rebuilt=recipes.is_free(inputs))
