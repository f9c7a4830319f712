"""Recipes: how a saved activation leaves in the forward pass and comes back in the backward pass.

A layer whose output can be kept in less memory attaches a `Recipe` to the output
tensor; the layers that must save that tensor for their gradient find it there
and keep what the recipe says instead. Nothing is encoded before a consumer asks,
so a tensor nobody saves costs nothing, and one that many save is encoded once.

Three orderings make it work (TensorFlow runs an operation as soon as its inputs
are there):

* a consumer's forward computation waits for the encoding, so that the dense
  tensor is not carried along until the encoder happens to run;
* what is kept is rebuilt only after the upstream gradient has arrived. Without
  that, decoding would follow encoding at once and nothing would be saved;
* and only after the gradient before it, in the order in which the tape takes them, has
  been computed. Without that, two branches of a network would be rebuilt at the same
  time, or not, as the threads happen to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from bittrain_tf import ledger, second_derivatives
from bittrain_tf.backward.vjp import vjp
from bittrain_tf.codecs import Codec
from bittrain_tf.planning import PRODUCT_SHARED_FOR, SHARED_FOR
from bittrain_tf.private import custom_gradient

_ATTRIBUTE = "_bittrain_recipe"
_BACKWARD = "_bittrain_backward"


class Kept:
    """What is kept of one tensor, and how that tensor is had again, bit for bit.

    Args:
        rebuild: `rebuild(*parts, *sources)` is the tensor.
        parts: The tensors kept for it.
        sources: What is kept of other tensors it is computed from.
        made: Whether the parts had to be made; else they are there in any case.
        is_product: Whether rebuilding takes a convolution or a matrix product.
    """

    def __init__(
        self,
        rebuild: Callable[..., tf.Tensor],
        parts: Sequence[tf.Tensor] = (),
        sources: Sequence[Kept] = (),
        *,
        made: bool = True,
        is_product: bool = False,
    ) -> None:
        self.parts, self.sources = tuple(parts), tuple(sources)
        self._rebuild = rebuild
        # A rebuilt tensor takes its full size as long as it waits for another reader. Decoding
        # or an elementwise function costs little, so it waits for the neighbouring layer only;
        # a product costs as much as the layer that made it, and waits for a block of layers.
        self._shared_for = PRODUCT_SHARED_FOR if is_product else SHARED_FOR
        self._shared: tuple[tf.Graph, int, tf.Tensor] | None = None
        #: The parts that had to be made, for a forward computation to wait for.
        self.encoded: tuple[tf.Tensor, ...] = _distinct(
            [*(self.parts if made else ()), *(part for s in self.sources for part in s.encoded)]
        )

    def again(self, dys: Sequence[tf.Tensor], made: dict[Kept, tf.Tensor]) -> tf.Tensor:
        """The tensor, available some time after the gradients `dys` are.

        In a graph, gradients written down close to each other share one rebuilt tensor.
        Run eagerly, it would have to be held for a reader that may never come.

        Args:
            dys: The gradients.
            made: What has been rebuilt for the same gradient, which is added to.
        """
        if self in made:
            return made[self]
        made[self] = tensor = self._again(dys, made)
        return tensor

    def _again(self, dys: Sequence[tf.Tensor], made: dict[Kept, tf.Tensor]) -> tf.Tensor:
        if tf.executing_eagerly():
            return self._anew(dys, made)
        graph = tf.compat.v1.get_default_graph()
        now = _Backward.here().gradients
        if self._shared is not None:
            where, since, tensor = self._shared
            if where is graph and now - since <= self._shared_for:
                # Waiting for these gradients, too: what is computed from it alone would run as
                # soon as it is there, blocks of layers too early.
                return after([tensor], dys)[0]
        tensor = self._anew(dys, made)
        self._shared = graph, now, tensor
        return tensor

    def _anew(self, dys: Sequence[tf.Tensor], made: dict[Kept, tf.Tensor]) -> tf.Tensor:
        sources = [source.again(dys, made) for source in self.sources]
        parts = after(self.parts, dys) if self.parts else []
        # Guarded one by one: oneDNN's graph rewriting fuses a filter and a bias gradient
        # that read one operation, even if they read different outputs of it.
        return _first_order(self._rebuild, *parts, *sources)


def _distinct(tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


class _Backward:
    """The backward pass written into a graph so far.

    Attributes:
        gradients: How many gradients: the clock of sharing.
        latest: By device, what tells that the gradient written last has been computed.
    """

    def __init__(self) -> None:
        self.gradients = 0
        self.latest: dict[str, list[tf.Tensor]] = {}

    @classmethod
    def here(cls) -> _Backward:
        """That of the current graph; one of its own for each gradient run eagerly."""
        if tf.executing_eagerly():
            return cls()
        graph = tf.compat.v1.get_default_graph()
        # Rides on the graph: held elsewhere, its tensors would keep the graph alive for ever.
        if not hasattr(graph, _BACKWARD):
            setattr(graph, _BACKWARD, cls())
        return getattr(graph, _BACKWARD)


class Rectified(NamedTuple):
    """A tensor rectified: the output, with its gradient, and how to have it again.

    Attributes:
        y: The output.
        passes: The packed mask, kept for the gradient, of where it passes.
        again: `again(source)` is the output.
        source: A tensor.
    """

    y: tf.Tensor
    passes: tf.Tensor
    again: Callable[[tf.Tensor], tf.Tensor]
    source: tf.Tensor


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

    def rectified(self, limit: float) -> Rectified | None:
        """The tensor rectified, `min(max(x, 0), limit)`, in one go with the making of it.

        None if that is not possible, or no cheaper than to rectify the tensor itself.
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
            *parts, last = codec.encode(self._before(tf.stop_gradient(x)), self._support)
            parts = (*parts, _tie(last, x))

        def rebuild(*parts: tf.Tensor) -> tf.Tensor:
            with tf.name_scope(f"decode_{codec.name}"):
                decoded = tf.ensure_shape(codec.decode(parts, shape, dtype), static_shape)
                return self._after(decoded)

        return Kept(rebuild, parts)

    def _before(self, x: tf.Tensor) -> tf.Tensor:
        """What to encode of the tensor, of its shape and type."""
        return x

    def _after(self, decoded: tf.Tensor) -> tf.Tensor:
        """The tensor from what was encoded."""
        return decoded


class Derived(Recipe):
    """Keep what the tensor was computed from, `fn(*sources)`, and compute it again.

    For views and copies (a reshape, a padding, a concatenation), and for cheap
    functions of what is kept anyway (a batch normalization of its input).

    Args:
        fn: A deterministic function of the sources.
        sources: Tensors.
        sources_kept: Whether the sources are kept anyway; by default, whether their
            recipes are free.
        is_product: Whether `fn` is, or holds, a convolution or a matrix product.
    """

    def __init__(
        self,
        fn: Callable[..., tf.Tensor],
        sources: Sequence[tf.Tensor],
        *,
        sources_kept: bool = False,
        is_product: bool = False,
    ) -> None:
        self.fn = fn
        self._is_product = is_product
        self.sources = tuple(sources)
        self.cost = 1 + cost(*sources)
        self._sources_kept = sources_kept

    @property
    def free(self) -> bool:
        """As in `Recipe`; also where the sources are kept anyway."""
        return super().free or self._sources_kept or all(is_free(x) for x in self.sources)

    def _keep(self, x: tf.Tensor) -> Kept:
        kept = [keep(source) for source in self.sources]
        return Kept(self.fn, sources=kept, is_product=self._is_product)


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


def cost(*tensors: tf.Tensor) -> int:
    """Roughly how many passes over a tensor it takes to have all of `tensors` again."""
    return sum(recipe.cost for recipe in map(of, tensors) if recipe is not None)


def is_free(x: tf.Tensor) -> bool:
    """Whether `x` can be kept without adding to what is kept already."""
    recipe = of(x)
    return recipe is not None and recipe.free


def keep(x: tf.Tensor) -> Kept:
    """What to keep of `x`: by its recipe, or else the tensor itself."""
    recipe = of(x)
    kept = Kept(_itself, (x,), made=False) if recipe is None else recipe.keep(x)
    entries = ledger.current()
    if entries is not None:
        entries.tensors[id(kept)] = x
    return kept


def keep_mask(packed: tf.Tensor, y: tf.Tensor) -> tuple[Kept, tf.Tensor]:
    """Keep a packed mask, as such; also `y`, now waiting for the mask to be there."""
    kept = Kept(tf.identity, (packed,))
    (y,) = after([y], kept.parts)
    return kept, y


def keep_inputs(
    fn: Callable[..., tf.Tensor], *inputs: tf.Tensor, linear: bool = False
) -> tf.Tensor:
    """`fn(*inputs)`, keeping of the inputs what their recipes say and nothing else.

    The backward pass differentiates `fn` at the rebuilt inputs. In a graph the
    part of `fn` its gradient does not need is never run again: for a convolution
    exactly the stock gradient operations remain.

    Args:
        fn: A deterministic function of floating-point tensors, without variables.
        *inputs: Its arguments.
        linear: Whether it is linear in the first of several.
    """
    kept = [keep(x) for x in inputs]
    y = fn(*detach(inputs, kept))
    gradient = differentiate_linear if linear else differentiate
    return with_gradient(y, inputs, kept, partial(gradient, fn))


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


def consume(
    fn: Callable[..., tf.Tensor], x: tf.Tensor, *weights: tf.Tensor, linear: bool = False
) -> tf.Tensor:
    """`fn(x, *weights)`, through `keep_inputs` if `x` rides a recipe, else as it is.

    Without a recipe `x` is dense whatever we do, and TensorFlow's own gradient
    keeps just that.
    """
    as_it_is = of(x) is None and ledger.current() is None
    return fn(x, *weights) if as_it_is else keep_inputs(fn, x, *weights, linear=linear)


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
    (y,) = with_gradients([y], inputs, kept, lambda dys, *rebuilt: gradient(*dys, *rebuilt))
    return y


def with_gradients(
    ys: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    kept: Sequence[Kept],
    gradient: Callable[..., Sequence[tf.Tensor | None]],
) -> list[tf.Tensor]:
    """`with_gradient` for several outputs: `gradient(dys, *rebuilt)`."""
    dtypes = [y.dtype for y in ys]
    scope = "/".join(filter(None, ("backward", tf.get_current_name_scope())))
    entries = ledger.current()
    entry = None if entries is None else entries.gradient(inputs, kept)

    def grad(*dys: tf.Tensor) -> Sequence[tf.Tensor | None]:
        if entry is not None:
            entries.begin(entry)
        with tf.name_scope(f"{scope}/"):  # the slash: this very scope, not one numbered anew
            # Densified: a gather's gradient arrives as tf.IndexedSlices.
            densified = [
                _first_order(tf.identity, tf.cast(tf.convert_to_tensor(dy), dtype))
                for dy, dtype in zip(dys, dtypes, strict=True)
            ]
            device, backward = densified[0].device, _Backward.here()
            backward.gradients += 1
            first = [*densified, *backward.latest.get(device, [])]
            made: dict[Kept, tf.Tensor] = {}
            rebuilt = [k.again(first, made) for k in kept]
            gradients = gradient(densified, *rebuilt)
            backward.latest[device] = _computed_with(gradients)
            return gradients

    return custom_gradient(ys, inputs, grad)


def _computed_with(gradients: Sequence[tf.Tensor | None]) -> list[tf.Tensor]:
    """What to wait for if all of `gradients` are to be there."""
    made = [gradient for gradient in gradients if gradient is not None]
    # Not the first, which waits for the others or comes with them: that of an image, say, is
    # computed by nobody if nothing reads it.
    return made[1:] or made


def after(tensors: Sequence[tf.Tensor], first: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """`tensors`, available only once `first` have been computed."""
    with tf.control_dependencies(list(first)):
        return tf.identity_n(list(tensors))


def _itself(x: tf.Tensor) -> tf.Tensor:
    return x


def differentiate(fn: Callable[..., Any], dy: Any, *inputs: tf.Tensor) -> list[tf.Tensor | None]:
    """The gradients of `fn` at `inputs`, the first not before the others; see `vjp`."""
    dx, *others = vjp(fn, inputs, dy)
    # The layers below start from dx. Were they not to wait, their backward pass would run
    # ahead while the rebuilt input of every layer still waits for its weights' gradient.
    wanted = [gradient for gradient in others if gradient is not None]
    if dx is not None and wanted:
        (dx,) = after([dx], wanted)
    return [dx, *others]


def differentiate_linear(
    fn: Callable[..., tf.Tensor], dy: tf.Tensor, *inputs: tf.Tensor
) -> list[tf.Tensor | None]:
    """`differentiate` for a function linear in its first argument.

    The gradient of that does not need it, so it is gone by the time that gradient is computed.
    """
    if tf.executing_eagerly():  # where both gradients are computed for the sake of each
        return differentiate(fn, dy, *inputs)
    x, *weights = inputs
    of_weights = vjp(lambda *weights: fn(x, *weights), weights, dy)
    wanted = [gradient for gradient in of_weights if gradient is not None]
    if wanted:
        (dy,) = after([dy], wanted)
    (dx,) = vjp(lambda x: fn(x, *weights), [x], dy)
    return [dx, *of_weights]


def _first_order(fn: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """`fn(*args)`, raising if it is differentiated: a silent zero would be a wrong gradient."""
    (y,) = custom_gradient([fn(*args)], args, second_derivatives.refuse)
    return y


def _tie(part: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """`part`, known to every tape to depend on `x` (which encoding in integers hides)."""
    (tied,) = custom_gradient([part], [x], second_derivatives.refuse)
    return tied
