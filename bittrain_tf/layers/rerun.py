"""Running a computation again: layers and blocks of layers that have no form of their own.

Only what a computation reads is kept. The backward pass runs it once more, from the
same weights, random seeds and other state, and differentiates that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.layers.registry import CompressedLayer, own_variables
from bittrain_tf.private import (
    call_state,
    copy_keras_mask,
    flatten_layers,
    recorded,
    recording,
    without_autocast,
)


def with_weights(
    call: Callable[[tf.Tensor], tf.Tensor], variables: Sequence[keras.Variable]
) -> Callable[..., tf.Tensor]:
    """`call(x)` as a function of `(x, *weights)`, the values of `variables`."""

    def fn(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return call(x)

    return fn


class Rerun(CompressedLayer):
    """Any layer, also one made of others, run again as a whole.

    Its outputs, losses and updates of state are those of the stock layer, and happen
    once a step. Run eagerly, or where a second run could come to something else (see
    `_Computation.repeatable`), it is the stock layer.
    """

    def __init_subclass__(cls) -> None:  # noqa: D105
        stock_call = cls.stock_class.call

        # Keras reads from the signature which arguments the layer takes.
        @functools.wraps(stock_call)
        def call(self: Rerun, *args: Any, **kwargs: Any) -> Any:
            return rerun(self, functools.partial(stock_call, self), args, kwargs)

        cls.call = call


def rerun(
    layer: keras.layers.Layer, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """`call(*args, **kwargs)`, of which nothing is kept but the arguments.

    Args:
        layer: The layer whose weights and state the computation uses.
        call: Any computation on the arguments, the weights and the state.
        args: Its arguments, nested as they may be.
        kwargs: Its arguments by name.
    """
    if recording() and not tf.executing_eagerly():
        computation = _Computation(layer, call, args, kwargs)
        if recorded(*computation.inputs) and computation.repeatable():
            return computation.run()
    return call(*args, **kwargs)


class _Computation:
    """A computation as a function of all tensors it reads; see `rerun`.

    Attributes:
        inputs: The tensors it is differentiated by.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._layer, self._call = layer, call
        self._structure = (list(args), kwargs)
        self._leaves = keras.tree.flatten(self._structure)
        self._places = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, tf.Tensor)]
        trained = layer.trainable_variables
        self._state = [v for v in own_variables(layer) if not any(v is w for w in trained)]
        self._variables = [*trained, *self._state]
        with without_autocast():  # a layer inside may read them in full precision
            values = [tf.convert_to_tensor(v) for v in self._variables]
        self._tensors = [*(self._leaves[i] for i in self._places), *values]
        self._before = values[len(trained) :]
        stateless = len(self._tensors) - len(self._state)
        self._differentiable = [i for i in range(stateless) if _is_differentiable(self._tensors[i])]
        self.inputs = [self._tensors[i] for i in self._differentiable]
        self._resumed = call_state()

    def repeatable(self) -> bool:
        """Whether a second run comes to the same, and has its gradients.

        Not if an operation has state that Keras does not know of (an unseeded random
        number, a variable of no layer), or if a tensor to be differentiated comes in or
        goes out otherwise than as an argument or a result: by a closure, an attribute.
        """
        found: list[bool] = []

        def probe(*tensors: tf.Tensor) -> None:
            with self._resumed():
                result, _ = self._compute(tensors)
            found.append(any(map(_is_composite, [*self._leaves, *keras.tree.flatten(result)])))

        # In a graph of its own, of which nothing is left over.
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._tensors]
        concrete = tf.function(probe, autograph=False).get_concrete_function(*specs)
        stateful = any(op.op_def.is_stateful for op in concrete.graph.get_operations())
        held = any(_is_of(concrete.graph, v) for v in self._attributes())
        return not (any(found) or stateful or held or recorded(*concrete.captured_inputs))

    def _attributes(self) -> list[Any]:
        layers = [self._layer, *flatten_layers(self._layer)]
        return [value for layer in layers for value in vars(layer).values()]

    def run(self) -> Any:
        """The result, with its losses added and its state updated."""
        kept = [recipes.keep(x) for x in self._tensors]
        result, scope = self._compute(recipes.detach(self._tensors, kept))
        for variable, before in zip(self._state, self._before, strict=True):
            after = scope.get_current_value(variable)
            if after is not before:
                variable.assign(after)
        ys = recipes.with_gradients(_outputs(result, scope), self.inputs, kept, self._gradient)
        # Regularizers and `add_loss` inside: one more output each.
        count = len(ys) - len(scope.losses)
        for loss in ys[count:]:
            # Of the base class, since functional models refuse to add losses of their own.
            keras.layers.Layer.add_loss(self._layer, loss)
        outputs = iter(ys[:count])
        return keras.tree.map_structure(
            lambda t: copy_keras_mask(t, next(outputs)) if _is_differentiable(t) else t, result
        )

    def _gradient(self, dys: Sequence[tf.Tensor], *rebuilt: tf.Tensor) -> Any:
        def outputs(*inputs: tf.Tensor) -> list[tf.Tensor]:
            tensors = list(rebuilt)
            for i, x in zip(self._differentiable, inputs, strict=True):
                tensors[i] = x
            with self._resumed():
                return _outputs(*self._compute(tensors))

        inputs = [rebuilt[i] for i in self._differentiable]
        return recipes.differentiate(outputs, dys, *inputs)

    def _compute(self, tensors: Sequence[tf.Tensor]) -> tuple[Any, keras.StatelessScope]:
        count = len(self._places)
        leaves = list(self._leaves)
        for place, x in zip(self._places, tensors[:count], strict=True):
            leaves[place] = copy_keras_mask(leaves[place], x)
        values = list(zip(self._variables, tensors[count:], strict=True))
        with without_autocast():  # which would round the values given
            scope = keras.StatelessScope(values, collect_losses=True)
        with scope:
            args, kwargs = keras.tree.pack_sequence_as(self._structure, leaves)
            return self._call(*args, **kwargs), scope


def _outputs(result: Any, scope: keras.StatelessScope) -> list[tf.Tensor]:
    return [*filter(_is_differentiable, keras.tree.flatten(result)), *scope.losses]


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def _is_of(graph: tf.Graph, value: Any) -> bool:
    return tf.is_symbolic_tensor(value) and value.graph is graph


def _is_composite(value: Any) -> bool:
    """Whether a value is made of tensors: sparse, ragged, a variable."""
    return tf.is_tensor(value) and not isinstance(value, tf.Tensor)
