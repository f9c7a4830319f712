"""Dense and EinsumDense: the input is kept by its recipe."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from bittrain_tf import recipes
from bittrain_tf.layers.activation import activate
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded


class _Product(CompressedLayer):
    """Multiply by the kernel, add the bias, activate."""

    def _product(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        raise NotImplementedError

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        kernel = tf.convert_to_tensor(self.kernel)
        # Only the kernel's gradient needs the input; a frozen layer keeps nothing.
        if self.trains_kernel() and recorded(kernel):
            y = recipes.consume(self._product(), inputs, kernel, linear=True)
        else:
            y = self._product()(inputs, kernel)
        bias = [] if self.bias is None else [tf.convert_to_tensor(self.bias)]
        if bias:
            y = ops.add(y, *bias)
        self.leave(y, self._linear, inputs, kernel, *bias, is_product=True)
        return activate(self.activation, y, self)

    def _linear(self, x: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        y = self._product()(x, kernel)
        return ops.add(y, *bias) if bias else y

    @staticmethod
    def skip_reason(layer: keras.layers.Layer) -> str | None:
        if getattr(layer, "quantization_mode", None):
            return f"quantized ({layer.quantization_mode}): Keras does not run its `call`"
        return None


@register_layer(keras.layers.Dense)
class CompressedDense(_Product):
    """`Dense`, LoRA included: its adapters are part of the kernel."""

    def _product(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        return ops.matmul


@register_layer(keras.layers.EinsumDense)
class CompressedEinsumDense(_Product):
    """`EinsumDense`, LoRA included."""

    def _product(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        equation = self.equation
        return lambda x, kernel: ops.einsum(equation, x, kernel)
