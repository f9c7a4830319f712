"""Recipes: how a saved activation leaves in the forward pass and comes back in the backward pass.

A layer whose output can be kept in less memory attaches a `Recipe` to the output
tensor; the layers that must save that tensor for their gradient find it there
and keep what the recipe says instead. Nothing is encoded before a consumer asks,
so a tensor nobody saves costs nothing, and one that many save is encoded once.

Two orderings make it work (TensorFlow runs an operation as soon as its inputs
are there):

* a consumer's forward computation waits for the encoding, so that the dense
  tensor is not carried along until the encoder happens to run;
* what is kept is rebuilt only after the upstream gradient has arrived. Without
  that, decoding would follow encoding at once and nothing would be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from bittrain_tf import second_derivatives
from bittrain_tf.backward.vjp import vjp
from bittrain_tf.codecs import Codec

_ATTRIBUTE = "_bittrain_recipe"


class Kept(NamedTuple):
    """What is kept of one tensor: `rebuild(*parts)` is that tensor again, bit for bit."""

    parts: tuple[tf.Tensor, ...]
    rebuild: Callable[..., tf.Tensor]

    @property
    def encoded(self) -> tuple[tf.Tensor, ...]:
        """The parts that had to be made, for a forward computation to wait for."""
        return () if self.rebuild is _itself else self.parts


class Recipe:
    """How to keep a tensor; rides on it (see `attach`).

    Attributes:
        cost: Roughly how many passes over the tensor one rebuild takes.
    """

    cost: int
    _kept: Kept | None = None

    @property
    def free(self) -> bool:
        """Whether keeping the tensor adds nothing to what is kept already."""
        return self._kept is not None

    def keep(self, x: tf.Tensor) -> Kept:
        """What to keep of `x`, the tensor this recipe is attached to; decided once."""
        if self._kept is None:
            self._kept = self._keep(x)
        return self._kept

    def rectified(self, limit: float) -> tf.Tensor | None:
        """The tensor rectified, `min(max(x, 0), limit)`, in one go with the making of it.

        Returns:
            The output, with its gradient and a recipe of its own; None if that is not
            possible, or no cheaper than to rectify the tensor itself.
        """
        return None

    def _keep(self, x: tf.Tensor) -> Kept:
        raise NotImplementedError


class Encoded(Recipe):
    """Keep the tensor in a codec.

    Args:
        codec: The codec.
        support: See `Codec.encode`.
    """

    cost = 4

    def __init__(self, codec: Codec, support: tf.Tensor | None = None) -> None:
        self._codec = codec
        self._support = support

    def _keep(self, x: tf.Tensor) -> Kept:
        shape = x.shape if x.shape.is_fully_defined() else tf.shape(x, out_type=tf.int64)
        static_shape, dtype, codec = x.shape, x.dtype, self._codec
        with tf.name_scope(f"encode_{codec.name}"):
            *parts, last = codec.encode(tf.stop_gradient(x), self._support)
            parts = (*parts, _tie(last, x))

        def rebuild(*parts: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(f"decode_{codec.name}"):
                return tf.ensure_shape(codec.decode(parts, shape, dtype), static_shape)

        return Kept(parts, rebuild)


class Derived(Recipe):
    """Keep what the tensor was computed from, `fn(*sources)`, and compute it again.

    For views and copies (a reshape, a padding, a concatenation), and for cheap
    functions of what is kept anyway (a batch normalization of its input).

    Args:
        fn: A deterministic function of the sources.
        sources: Tensors.
        sources_kept: Whether the sources are kept anyway; by default, whether their
            recipes are free.
    """

    def __init__(
        self,
        fn: Callable[..., tf.Tensor],
        sources: Sequence[tf.Tensor],
        *,
        sources_kept: bool = False,
    ) -> None:
        self.fn = fn
        self.sources = tuple(sources)
        riding = [of(source) for source in self.sources]
        self.cost = 1 + sum(recipe.cost for recipe in riding if recipe is not None)
        self._sources_kept = sources_kept

    @property
    def free(self) -> bool:
        """As in `Recipe`; also where the sources are kept anyway."""
        return super().free or self._sources_kept or all(is_free(x) for x in self.sources)

    def _keep(self, x: tf.Tensor) -> Kept:
        kept = [keep(source) for source in self.sources]
        fn = self.fn

        def rebuild(*parts: tf.Tensor) -> tf.Tensor:
            return fn(*_rebuild_each(kept, parts))

        return Kept(tuple(part for k in kept for part in k.parts), rebuild)


def attach(x: tf.Tensor, recipe: Recipe) -> tf.Tensor:
    """Let `recipe` ride on `x`; returns `x`."""
    setattr(x, _ATTRIBUTE, recipe)
    return x


def of(x: tf.Tensor) -> Recipe | None:
    """The recipe riding on `x`, if it can be used where we are.

    A tensor from outside the graph (seen from inside a `tf.while_loop`, say) has
    none: it was captured, and the parts would belong elsewhere.
    """
    recipe = getattr(x, _ATTRIBUTE, None)
    if recipe is None or tf.executing_eagerly():
        return recipe
    inside = tf.is_symbolic_tensor(x) and x.graph is tf.compat.v1.get_default_graph()
    return recipe if inside else None


def is_free(x: tf.Tensor) -> bool:
    """Whether `x` can be kept without adding to what is kept already."""
    recipe = of(x)
    return recipe is not None and recipe.free


def keep(x: tf.Tensor) -> Kept:
    """What to keep of `x`: by its recipe, or else the tensor itself."""
    recipe = of(x)
    return Kept((x,), _itself) if recipe is None else recipe.keep(x)


def keep_mask(packed: tf.Tensor, y: tf.Tensor) -> tuple[Kept, tf.Tensor]:
    """Keep a packed mask, as such; also `y`, now waiting for the mask to be there."""
    kept = Kept((packed,), tf.identity)
    (y,) = after([y], kept.parts)
    return kept, y


def keep_inputs(fn: Callable[..., tf.Tensor], *inputs: tf.Tensor) -> tf.Tensor:
    """`fn(*inputs)`, keeping of the inputs what their recipes say and nothing else.

    The backward pass differentiates `fn` at the rebuilt inputs. In a graph the
    part of `fn` its gradient does not need is never run again: for a convolution
    exactly the stock gradient operations remain.

    Args:
        fn: A deterministic function of floating-point tensors, without variables.
        *inputs: Its arguments.
    """
    kept = [keep(x) for x in inputs]
    y = fn(*detach(inputs, kept))
    return with_gradient(y, inputs, kept, partial(differentiate, fn))


def detach(inputs: Sequence[tf.Tensor], kept: Sequence[Kept]) -> list[tf.Tensor]:
    """`inputs` without their gradient, and not before what is kept of them is encoded."""
    encoded = [part for k in kept for part in k.encoded]
    # Only those that are encoded wait, by a node of its own kind. A plain identity would be
    # optimized away and leave the wait to the consumer: then TensorFlow no longer makes one
    # operation of a convolution, its bias and its activation.
    return [
        tf.stop_gradient(after([x], encoded)[0] if k.encoded else x)
        for x, k in zip(inputs, kept, strict=True)
    ]


def consume(fn: Callable[..., tf.Tensor], x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
    """`fn(x, *weights)`, through `keep_inputs` if `x` rides a recipe, else as it is.

    Without a recipe `x` is dense whatever we do, and TensorFlow's own gradient
    keeps just that.
    """
    return fn(x, *weights) if of(x) is None else keep_inputs(fn, x, *weights)


def with_gradient(
    y: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    kept: Sequence[Kept],
    gradient: Callable[..., Sequence[tf.Tensor | None]],
) -> tf.Tensor:
    """`y`, with `gradient` as its gradient with respect to `inputs`.

    Args:
        y: A function of `inputs`, computed already; its own gradient is cut off.
        inputs: The tensors to send gradients to.
        kept: What the gradient needs.
        gradient: `gradient(dy, *rebuilt)`, a tensor (or None) for each of `inputs`;
            `rebuilt` are the tensors of `kept`.
    """
    dtype = y.dtype
    scope = "/".join(filter(None, ("backward", tf.get_current_name_scope())))

    @tf.custom_gradient
    def bridge(y: tf.Tensor, *inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def grad(dy: tf.Tensor) -> tuple[tf.Tensor | None, ...]:
            with tf.name_scope(f"{scope}/"):  # the slash: this very scope, not one numbered anew
                # Densified: a gather's gradient arrives as tf.IndexedSlices.
                dy = _first_order(tf.identity, tf.cast(tf.convert_to_tensor(dy), dtype))
                parts = after([part for k in kept for part in k.parts], [dy])
                # Guarded one by one: oneDNN's graph rewriting fuses a filter and a bias gradient
                # that read one operation, even if they read different outputs of it.
                guarded = [k._replace(rebuild=partial(_first_order, k.rebuild)) for k in kept]
                rebuilt = _rebuild_each(guarded, parts)
                return (None, *gradient(dy, *rebuilt))

        return y, grad

    return bridge(tf.stop_gradient(y), *inputs)


def after(tensors: Sequence[tf.Tensor], first: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`tensors`, available only once `first` have been computed."""
    with tf.control_dependencies(list(first)):
        return tf.identity_n(list(tensors))


def _rebuild_each(kept: Sequence[Kept], parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    rebuilt, start = [], 0
    for k in kept:
        end = start + len(k.parts)
        rebuilt.append(k.rebuild(*parts[start:end]))
        start = end
    return rebuilt


def _itself(x: tf.Tensor) -> tf.Tensor:
    return x


def differentiate(
    fn: Callable[..., tf.Tensor], dy: tf.Tensor, *inputs: tf.Tensor
) -> list[tf.Tensor | None]:
    """The gradients of `fn` at `inputs`, the first not before the others."""
    dx, *others = vjp(fn, inputs, dy)
    # The layers below start from dx. Were they not to wait, their backward pass would run
    # ahead while the rebuilt input of every layer still waits for its weights' gradient.
    wanted = [gradient for gradient in others if gradient is not None]
    if dx is not None and wanted:
        (dx,) = after([dx], wanted)
    return [dx, *others]


def _first_order(fn: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """`fn(*args)`, raising if it is differentiated: a silent zero would be a wrong gradient."""

    @tf.custom_gradient
    def guarded(*args: tf.Tensor) -> tuple[tf.Tensor, Callable[..., NoReturn]]:
        return fn(*args), second_derivatives.refuse

    return guarded(*args)


def _tie(part: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """`part`, known to every tape to depend on `x` (which encoding in integers hides)."""

    @tf.custom_gradient
    def tied(part: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., NoReturn]]:
        return part, second_derivatives.refuse

    return tied(part, x)
