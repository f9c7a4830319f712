"""The only non-public TensorFlow and Keras symbols this package uses, each with its reason.

Everything else goes through the public APIs, so a TensorFlow or Keras release
that moves one of these is repaired here and nowhere else.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import AutocastScope
from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES
from tensorflow.python.eager import record
from tensorflow.python.framework import ops

PART = "activation_pruning"
_GRADIENT = "BittrainGradient"  # as registered with TensorFlow
_GRADIENTS = "_bittrain_gradients"  # of a graph: those of its operations, by name


def recording() -> bool:
    """Whether a `tf.GradientTape` is active, so that a backward pass may follow.

    Inference must not pay for encoding, and neither the `training` argument (a
    fine-tuned backbone is called with `training=False`) nor any public function
    says whether gradients will be asked for.
    """
    return record.could_possibly_record() and not _vectorizing()


def recorded(*tensors: tf.Tensor) -> bool:
    """Whether an active tape watches any of `tensors`.

    False for everything upstream of the first trainable weight: a frozen
    backbone keeps nothing, so it must not be made to encode anything.
    """
    return record.should_record_backprop(list(tensors)) and not _vectorizing()


def custom_gradient(
    ys: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    gradient: Callable[..., Sequence[tf.Tensor | None]],
) -> list[tf.Tensor]:
    """`ys`, with `gradient` as their only gradient.

    What `tf.custom_gradient` does; but that registers the gradient of every call in a graph
    under a new name, for good, and the registry keeps the closure, and with it the graph,
    alive for as long as the process runs. Here one name is registered, and the gradient is
    an attribute of the graph.

    Args:
        ys: Tensors; whatever they were computed from, no gradient goes there.
        inputs: The tensors to send gradients to.
        gradient: `gradient(*dys)`, a tensor (or None) for each of `inputs`.
    """
    inputs = [tf.convert_to_tensor(x) for x in inputs]
    count = len(ys)
    with record.stop_recording():
        if tf.executing_eagerly():
            outputs = tf.identity_n(list(ys))
        else:
            graph = tf.compat.v1.get_default_graph()
            with graph.gradient_override_map({"IdentityN": _GRADIENT}):
                # The inputs, too: where a whole function is differentiated, by a tape outside
                # of it, gradients follow the operations.
                outputs = tf.identity_n([*ys, *inputs])[:count]
            if not hasattr(graph, _GRADIENTS):
                setattr(graph, _GRADIENTS, {})
            getattr(graph, _GRADIENTS)[outputs[0].op.name] = count, gradient
    record.record_operation("IdentityN", outputs, inputs, gradient)
    return outputs


@tf.RegisterGradient(_GRADIENT)
def _custom_gradient(op: tf.Operation, *dys: tf.Tensor) -> list[tf.Tensor | None]:
    try:
        count, gradient = getattr(op.graph, _GRADIENTS, {})[op.name]
    except KeyError:
        raise LookupError(
            f"The gradient of {op.name!r} is not known in this graph: it was read from a file, "
            "or copied. Differentiate the function that the compressed model was called in, or "
            "call bittrain_tf.restore(model) before it is saved."
        ) from None
    return [*[None] * count, *gradient(*dys[:count])]


def forget_gradients(graph: tf.Graph) -> None:
    """Take the gradients of a graph that is no longer needed out of TensorFlow's registry.

    `tf.custom_gradient` (in `tf.nn.silu`, say) enters them for good, and each keeps its graph
    alive. There is no public way to undo that.
    """
    for op in graph.get_operations():
        if op.type == "IdentityN":
            with contextlib.suppress(ValueError):  # it has no gradient of its own
                name = op.get_attr("_gradient_op_type").decode()
                if name.startswith("CustomGradient-"):
                    ops.gradient_registry._registry.pop(name, None)


def _vectorizing() -> bool:
    """Whether this is the body of a `tf.vectorized_map`.

    It is written into a graph once and then translated operation by operation, which
    forgets custom gradients without a word. No function tells; the name scope does.
    """
    scopes = () if tf.executing_eagerly() else tf.get_current_name_scope().split("/")
    return any(scope.startswith("loop_body") for scope in scopes)


def flatten_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """All sub-layers at any depth, without `layer` itself and what `add_part` added.

    `Model.layers` stops at the first level and composite layers
    (`Bidirectional`, `MultiHeadAttention`, ...) publish theirs under names of
    their own.
    """
    found = layer._flatten_layers(include_self=False, recursive=True)
    parts = {id(vars(each).get(PART)) for each in (layer, *found)}
    return [each for each in found if id(each) not in parts]


def add_part(layer: keras.layers.Layer, part: keras.layers.Layer) -> None:
    """Make `part` the attribute `PART` of a layer: a sub-layer, saved and counted as such.

    Keras locks the state of a layer that has been built.
    """
    locked = layer._tracker.locked
    layer._tracker.unlock()
    setattr(layer, PART, part)
    layer._tracker.locked = locked


def remove_part(layer: keras.layers.Layer) -> None:
    """Undo `add_part`; to delete the attribute would leave the sub-layer tracked."""
    layer._layers.remove(getattr(layer, PART))
    delattr(layer, PART)


def has_keras_mask(*tensors: Any) -> bool:
    """Whether Keras attached a timestep mask to any of `tensors`.

    Merging layers read it from the tensor object, so such tensors cannot be
    replaced by others of the same value.
    """
    return any(getattr(t, "_keras_mask", None) is not None for t in tensors)


def copy_keras_mask(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """`target`, which stands in for `source`, with its timestep mask if it has one."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None:
        target._keras_mask = mask
    return target


def register_as(cls: type, name: str | None) -> None:
    """Have Keras write `cls` into files by this registered name, None for a class of its own.

    The public decorator would also have it read `cls` from files.
    """
    GLOBAL_CUSTOM_NAMES[cls] = name


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Read Keras variables in the precision they have, whatever layer is being called."""
    return AutocastScope(None)


def call_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """How Keras calls layers at this point, to be resumed when their call is over.

    A call passes arguments such as `training` down to the layers inside, and the dtype to
    cast variables to, by global state; a call repeated in the backward pass finds neither.
    """
    names = ("current_call_ctx", "autocast_scope")
    state = {name: copy.copy(global_state.get_global_attribute(name)) for name in names}

    @contextlib.contextmanager
    def resumed() -> Any:
        before = {name: global_state.get_global_attribute(name) for name in names}
        try:
            for name, value in state.items():
                # A copy, since each layer called writes its own arguments into it.
                global_state.set_global_attribute(name, copy.copy(value))
            yield
        finally:
            for name, value in before.items():
                global_state.set_global_attribute(name, value)

    return resumed
