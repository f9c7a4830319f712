"""Max pooling.

Over windows that do not overlap, which is how most networks use it, one bit an
element says which were the maxima; stock keeps the input and the output, dense.
Over overlapping windows the input is kept by its recipe and the output found
again from it. Average pooling saves nothing and stays stock.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from bittrain_tf import recipes
from bittrain_tf.backward.pooling import max_pool_gradient
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded


@register_layer(
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
)
class CompressedGlobalMaxPooling(CompressedLayer):
    """Global max pooling, the input kept by its recipe."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        pool = super().call
        return recipes.consume(pool, inputs) if recorded(inputs) else pool(inputs)


@register_layer(
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
)
class CompressedMaxPooling(CompressedLayer):
    """Max pooling; of sparse values the largest are sparse too, so readers may encode them."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        pool = super().call
        if not recorded(inputs):
            y = pool(inputs)
        elif tuple(self.pool_size) == tuple(self.strides) and self.data_format == "channels_last":
            y = self._pool_disjoint(inputs)
        else:
            y = recipes.consume(pool, inputs)
        if recipes.of(inputs) is not None:
            recipes.attach(y, recipes.Encoded(self.codec))
        return y

    def _pool_disjoint(self, inputs: tf.Tensor) -> tf.Tensor:
        pool, pool_size, padding = super().call, self.pool_size, self.padding
        x = tf.stop_gradient(inputs)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = pool(x)
        selections = tape.gradient(y, x)  # of the sum: 1 for the maxima, else 0
        kept = recipes.keep_mask(tf.not_equal(selections, 0))
        (y,) = recipes.after([y], kept.parts)
        return recipes.with_gradient(
            y,
            [inputs],
            [kept],
            lambda dy, selected: [max_pool_gradient(dy, selected, pool_size, padding)],
        )
