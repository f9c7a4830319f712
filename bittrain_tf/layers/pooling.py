"""Max pooling.

Over windows that do not overlap, which is how most networks use it, one bit an
element says which were the maxima; stock keeps the input and the output, dense.
Over overlapping windows the input is kept by its recipe and the output found
again from it. Average pooling saves nothing and stays stock.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from bittrain_tf import native, recipes
from bittrain_tf.backward.pooling import max_pool_gradient
from bittrain_tf.codecs import mask
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded, recording


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
        sparse = recipes.of(inputs) is not None
        kept = recipes.Encoded(self.codec) if sparse else None
        return self.leave(y, pool, inputs, kept=kept) if recording() else y

    def _pool_disjoint(self, inputs: tf.Tensor) -> tf.Tensor:
        pool_size, padding = self.pool_size, self.padding
        x = tf.stop_gradient(inputs)
        natively = _is_native(x, pool_size)
        if natively:
            y, packed = native.max_pool(x, pool_size)
        else:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = super().call(x)
            selections = tape.gradient(y, x)  # of the sum: 1 for the maxima, else 0
            packed = mask.pack(tf.not_equal(selections, 0))
        kept, y = recipes.keep_mask(packed, y)
        static_shape = x.shape
        shape = static_shape if static_shape.is_fully_defined() else tf.shape(x)

        def gradient(dy: tf.Tensor, packed: tf.Tensor) -> list[tf.Tensor]:
            if natively:
                dx = native.max_pool_gradient(dy, packed, pool_size)
                return [tf.ensure_shape(dx, static_shape)]
            selected = tf.reshape(mask.unpack(packed, tf.reduce_prod(shape)), shape)
            selected = tf.ensure_shape(selected, static_shape)
            return [max_pool_gradient(dy, selected, pool_size, padding)]

        return recipes.with_gradient(y, [inputs], [kept], gradient)


def _is_native(x: tf.Tensor, pool_size: Sequence[int]) -> bool:
    """Whether the native kernels can pool `x`."""
    if not (x.shape.rank == 4 and x.dtype == tf.float32 and native.available()):
        return False
    _, height, width, channels = x.shape
    if None in (height, width, channels):
        return False
    return height % pool_size[0] == width % pool_size[1] == channels % 8 == 0
