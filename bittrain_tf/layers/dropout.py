"""Dropout: the mask is kept at one bit an element, the output as a bitmap by its readers."""

from __future__ import annotations

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.codecs import mask
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded, recording


@register_layer(
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
)
class CompressedDropout(CompressedLayer):
    """`Dropout` and `SpatialDropout`: the stock layer draws the mask, once a step."""

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not (training and 0 < self.rate < 1 and recording() and inputs.dtype.is_floating):
            return super().call(inputs, training=training)
        # What the stock layer makes of ones is its mask times its scale.
        scaled = super().call(tf.ones_like(inputs), training=True)
        passes = tf.not_equal(scaled, 0)
        y = tf.where(passes, inputs * scaled, tf.zeros([], inputs.dtype))
        if not recorded(inputs):
            return recipes.attach(y, recipes.Encoded(self.codec))
        packed = mask.pack(passes)
        kept, y = recipes.keep_mask(packed, tf.stop_gradient(y))
        scale = 1.0 / (1.0 - self.rate)

        def drop(x: tf.Tensor, packed: tf.Tensor) -> tf.Tensor:
            return mask.choose(x, packed, on=scale, off=0.0)

        y = recipes.with_gradient(y, [inputs], [kept], lambda dy, passes: [drop(dy, passes)])
        return self.leave(y, drop, inputs, packed, kept=recipes.Encoded(self.codec))
