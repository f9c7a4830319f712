"""Running a computation again: layers and blocks of layers that have no form of their own.

Only what a computation reads is kept. The backward pass runs it once more, from the
same weights, random seeds and other state, and differentiates that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.layers.registry import CompressedLayer
from bittrain_tf.private import recorded, recording


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
    once a step. Run eagerly, or with randomness that Keras does not seed, it is the
    stock layer: what it draws could not be drawn again.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return rerun(self, super().call, args, kwargs)


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
    leaves = keras.tree.flatten((list(args), kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    inputs = [leaves[i] for i in places]
    trained = layer.trainable_variables
    weights = [tf.convert_to_tensor(v) for v in trained]
    if not recording() or tf.executing_eagerly() or not recorded(*inputs, *weights):
        return call(*args, **kwargs)
    state = [v for v in layer.variables if not any(v is w for w in trained)]
    before = [tf.convert_to_tensor(v) for v in state]

    def compute(*tensors: tf.Tensor) -> tuple[Any, list[tf.Tensor], keras.StatelessScope]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=False):
            given[place] = tensor
        values = [*zip(trained, tensors[len(places) :], strict=True)]
        values += zip(state, before, strict=True)
        with keras.StatelessScope(values, collect_losses=True) as scope:
            args_given, kwargs_given = keras.tree.pack_sequence_as((list(args), kwargs), given)
            result = call(*args_given, **kwargs_given)
        # A regularizer or `add_loss` inside is one more output.
        return result, [t for t in keras.tree.flatten(result) if _is_float(t)] + scope.losses, scope

    def outputs(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return compute(*tensors)[1]

    arguments = [*inputs, *weights]
    kept = [recipes.keep(x) for x in arguments]
    created = _operation_count()
    result, ys, scope = compute(*recipes.detach(arguments, kept))
    if _draws_unseeded(created):
        return call(*args, **kwargs)
    for variable, value in zip(state, before, strict=True):
        after = scope.get_current_value(variable)
        if after is not value:
            variable.assign(after)
    ys = recipes.with_gradients(
        ys, arguments, kept, lambda dys, *rebuilt: recipes.differentiate(outputs, dys, *rebuilt)
    )
    for _ in scope.losses:
        layer.add_loss(ys.pop())
    return keras.tree.map_structure(lambda t: ys.pop(0) if _is_float(t) else t, result)


def _is_float(value: Any) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


def _operation_count() -> int:
    return len(tf.compat.v1.get_default_graph().get_operations())


def _draws_unseeded(created: int) -> bool:
    """Whether the operations written since `created` draw random numbers from hidden state."""
    written = tf.compat.v1.get_default_graph().get_operations()[created:]
    return any("Random" in op.type and op.op_def.is_stateful for op in written)
