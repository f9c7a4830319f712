"""Layers of several inputs: what they save is kept by the inputs' recipes.

`Average` and `Subtract` save nothing and stay stock. So does `Add`, but its output
is what the next layer reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import has_keras_mask, recorded, recording


@register_layer(keras.layers.Multiply, keras.layers.Maximum, keras.layers.Minimum)
class CompressedProduct(CompressedLayer):
    """`Multiply`, `Maximum` and `Minimum`, whose gradients need their inputs."""

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        merge = super().call
        if not recording() or has_keras_mask(*inputs):  # Keras reads masks from the very tensors
            return merge(inputs)
        inputs = [tf.convert_to_tensor(x) for x in inputs]

        def fn(*xs: tf.Tensor) -> tf.Tensor:
            return merge(list(xs))

        keeps = any(recipes.of(x) is not None for x in inputs) and recorded(*inputs)
        y = recipes.keep_inputs(fn, *inputs) if keeps else merge(inputs)
        return self.leave(y, fn, *inputs)


# Passes over a tensor to add it up again, beyond which keeping it is the better bargain:
# encoding and decoding it as a bitmap takes about ten.
_MOST_PASSES = 8


@register_layer(keras.layers.Add)
class CompressedAdd(CompressedLayer):
    """`Add`: its readers keep nothing where its terms can be had from what is kept anyway.

    In a residual network they are a batch normalization's output and the block's
    input. Each block adds to the work of rebuilding the next, hence the limit.
    """

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        merge = super().call
        y = merge(inputs)
        if not recording():
            return y
        cheap = all(recipes.is_free(x) for x in inputs) and recipes.cost(*inputs) < _MOST_PASSES
        return self.leave(y, lambda *xs: merge(list(xs)), *inputs, rebuilt=cheap)


@register_layer(keras.layers.Concatenate)
class CompressedConcatenate(CompressedLayer):
    """`Concatenate`: its readers keep the pieces, each once however often it is used.

    In a DenseNet every layer reads the concatenation of all before it; stock keeps
    each of these, which is quadratic in the depth of a block.
    """

    def call(self, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        merge = super().call
        y = merge(inputs)
        if recording():
            # Integer inputs are converted; the others are themselves, recipes and all.
            pieces = [tf.cast(x, y.dtype) for x in inputs]
            recipes.attach(y, _Concatenation(self.axis, pieces))
        return y


class _Concatenation(recipes.Derived):
    """A concatenation; one of concatenations along the same axis is one of their pieces."""

    def __init__(self, axis: int, pieces: Sequence[tf.Tensor]) -> None:
        flat: list[tf.Tensor] = []
        for piece in pieces:
            recipe = recipes.of(piece)
            if isinstance(recipe, _Concatenation) and recipe.axis == axis:
                flat += recipe.sources
            else:
                flat.append(piece)
        super().__init__(lambda *pieces: tf.concat(pieces, axis), flat)
        self.axis = axis
