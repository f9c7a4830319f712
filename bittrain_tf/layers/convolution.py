"""Convolutions of every kind: the input is kept by its recipe, nothing else changes.

The computations are those of the Keras layers, on the same public operations,
as functions of the input and the weights so that they can be differentiated at
the rebuilt input.
"""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from bittrain_tf import recipes
from bittrain_tf.layers.activation import activate, activate_linear
from bittrain_tf.layers.registry import CompressedLayer, register_layer
from bittrain_tf.private import recorded

_CHEAP_FAN_IN = 64


class _Convolution(CompressedLayer):
    """Convolve, add the bias, activate."""

    def _kernels(self) -> list[tf.Tensor]:
        return [tf.convert_to_tensor(self.kernel)]

    def _convolve(self, x: tf.Tensor, *kernels: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    def _is_cheap(self, *kernels: tf.Tensor) -> bool:
        """Whether convolving again takes less time than decoding the result would."""
        return False

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        kernels = self._kernels()
        biases = [tf.convert_to_tensor(self.bias)] if self.use_bias else []

        def convolve_and_add(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            y = self._convolve(x, *weights[: len(kernels)])
            for bias in weights[len(kernels) :]:
                channels_last = self.data_format == "channels_last"
                y = ops.add(
                    y,
                    ops.reshape(
                        bias,
                        (1,) * (self.rank + 1) + (-1,)
                        if channels_last
                        else (1, -1) + (1,) * self.rank,
                    ),
                )
            return y

        weights = [*kernels, *biases]
        # Only a kernel's gradient needs the input; a frozen layer keeps nothing.
        if not (self.trains_kernel() and recorded(*kernels)):
            return activate(self.activation, convolve_and_add(inputs, *weights), self)
        # The input is kept for the kernel's gradient. If that takes it as it is, the output of a
        # cheap convolution need not be kept.
        cheap = recipes.of(inputs) is None and self._is_cheap(*kernels)
        return activate_linear(
            self.activation, convolve_and_add, inputs, *weights, layer=self, cheap=cheap
        )


class _DirectConvolution(_Convolution):
    """Those with a kernel `[*window, input channels / groups, filters]`."""

    def _is_cheap(self, kernel: tf.Tensor) -> bool:
        # Multiplications for each output element: 27 for 3x3 over an image's three channels.
        return self.groups == 1 and math.prod(kernel.shape[:-1]) <= _CHEAP_FAN_IN


@register_layer(keras.layers.Conv2D, keras.layers.Conv3D)
class CompressedConvolution(_DirectConvolution):
    """`Conv2D` and `Conv3D`."""

    def _convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return self.convolution_op(x, kernel)


@register_layer(keras.layers.Conv1D)
class CompressedConvolution1D(_DirectConvolution):
    """`Conv1D`, which alone has causal padding."""

    def _convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        padding = self.padding
        if padding == "causal":
            before = [self.dilation_rate[0] * (self.kernel_size[0] - 1), 0]
            channels_last = self.data_format == "channels_last"
            x = ops.pad(x, [[0, 0], before, [0, 0]] if channels_last else [[0, 0], [0, 0], before])
            padding = "valid"
        return ops.conv(
            x,
            kernel,
            strides=list(self.strides),
            padding=padding,
            dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )


@register_layer(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class CompressedDepthwiseConvolution(_Convolution):
    """`DepthwiseConv1D` and `DepthwiseConv2D`."""

    def _convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return ops.depthwise_conv(
            x,
            kernel,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )


@register_layer(
    keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose
)
class CompressedTransposedConvolution(_Convolution):
    """`Conv1DTranspose`, `Conv2DTranspose` and `Conv3DTranspose`."""

    def _convolve(self, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return ops.conv_transpose(
            x,
            kernel,
            strides=list(self.strides),
            padding=self.padding,
            output_padding=self.output_padding,
            dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )


@register_layer(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class CompressedSeparableConvolution(_Convolution):
    """`SeparableConv1D` and `SeparableConv2D`: a depthwise and a pointwise convolution.

    The tensor between the two is dense and kept as stock keeps it.
    """

    def _kernels(self) -> list[tf.Tensor]:
        return [
            tf.convert_to_tensor(self.depthwise_kernel),
            tf.convert_to_tensor(self.pointwise_kernel),
        ]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        depthwise_kernel, _ = self._kernels()

        def depthwise(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
            return ops.depthwise_conv(
                x,
                kernel,
                strides=self.strides,
                padding=self.padding,
                dilation_rate=self.dilation_rate,
                data_format=self.data_format,
            )

        if self.trains_kernel() and recorded(depthwise_kernel):
            between = recipes.consume(depthwise, inputs, depthwise_kernel, linear=True)
        else:
            between = depthwise(inputs, depthwise_kernel)
        self.prune_kept(between)
        return super().call(between)

    def _convolve(self, x: tf.Tensor, _: tf.Tensor, pointwise_kernel: tf.Tensor) -> tf.Tensor:
        return ops.conv(
            x, pointwise_kernel, strides=1, padding="valid", data_format=self.data_format
        )
