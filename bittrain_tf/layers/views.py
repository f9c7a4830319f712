"""Layers that only move or repeat elements: recipes pass through them.

A reader of the moved tensor keeps the original, which is never larger, and
moves it again in the backward pass.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recording


@register_layer(
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.Reshape,
    keras.layers.UpSampling1D,
    keras.layers.UpSampling2D,
    keras.layers.UpSampling3D,
    keras.layers.ZeroPadding1D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
)
class CompressedView(CompressedLayer):
    """Views and copies at least as large as their input."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        view = super().call
        y = view(inputs)
        if recording() and inputs.dtype.is_floating:
            recipes.attach(y, recipes.Derived(view, [inputs]))
        return y


@register_layer(
    keras.layers.Cropping1D,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
)
class CompressedCropping(CompressedView):
    """Cropping makes the tensor smaller: worth it only where the input has a recipe."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if recipes.of(inputs) is None:
            return super(CompressedView, self).call(inputs)
        return super().call(inputs)
