"""Gradients of convolutions, as convolutions.

TensorFlow Lite's kernels lay the patches under the kernel out as rows of a matrix (im2col), for
the whole batch at once. Where that matrix is large, samples go one by one.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable

import tensorflow as tf

from tflite_tools.rules.matrices import product_over_rows
from tflite_tools.rules.registry import attribute, register, static_shape
from tflite_tools.rules.windows import Windows, check_channels_last, fit

# Bytes of patches beyond which a batch is taken apart. Some 10 µs an operator are nothing beside
# the time it takes to lay out as much.
_MOST_PATCHES = 1 << 20


def _by_sample(fn: Callable[..., tf.Tensor], patches: int, *batches: tf.Tensor) -> list[tf.Tensor]:
    """`fn` of the batches, or of each sample if `patches` bytes are many."""
    samples = batches[0].shape[0]
    if samples == 1 or patches <= _MOST_PATCHES:
        return [fn(*batches)]
    apart = [tf.split(x, samples) for x in batches]
    return [fn(*each) for each in zip(*apart, strict=True)]


def _by_group(fn: Callable[..., tf.Tensor], groups: int, *arrays: tf.Tensor) -> tf.Tensor:
    """`fn` of each group of channels, which are the last dimension of all arrays and the result."""
    if groups == 1:
        return fn(*arrays)
    apart = [tf.split(x, groups, -1) for x in arrays]
    return tf.concat([fn(*each) for each in zip(*apart, strict=True)], -1)


def _joined(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _patches(count: list[int], kernel: tf.Tensor, batch: int) -> int:
    height, width, channels, _ = kernel.shape
    return (
        0 if height == width == 1 else 4 * batch * count[0] * count[1] * height * width * channels
    )


@register("Conv2D")
def convolution(op: tf.Operation, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    """As it is, by sample where that takes less room."""
    check_channels_last(op)
    _, *count, _ = static_shape(op.outputs[0])
    options = {name: attribute(op, name) for name in ("strides", "padding", "dilations")}
    if options["padding"] == "EXPLICIT":
        pairs = list(attribute(op, "explicit_paddings"))
        options["padding"] = [pairs[k : k + 2] for k in range(0, 8, 2)]

    def convolve(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        return tf.nn.conv2d(
            x,
            kernel,
            options["strides"],
            options["padding"],
            dilations=options["dilations"],
        )

    def group(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        patches = _patches(count, kernel, x.shape[0])
        return _joined(_by_sample(lambda x: convolve(x, kernel), patches, x))

    return _by_group(group, x.shape[3] // kernel.shape[2], x, kernel)


@register("Conv2DBackpropInput")
def input_gradient(
    op: tf.Operation, x_shape: tf.Tensor, kernel: tf.Tensor, dy: tf.Tensor
) -> tf.Tensor:
    """A convolution with the kernel turned round; zeros between the gradients where it strides."""
    _, height, width, channels = (int(n) for n in tf.get_static_value(x_shape))
    windows = _windows(op, [height, width], dy, kernel.shape.as_list()[:2])

    def group(kernel: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        turned = tf.transpose(_turned(kernel), [0, 1, 3, 2])

        def convolve(dy: tf.Tensor) -> tf.Tensor:
            padded = _between(windows, dy)
            return tf.nn.conv2d(padded, turned, 1, "VALID", dilations=windows.dilation)

        if windows.kernel == [1, 1] and windows.before == [0, 0]:
            # Few multiplications, and none with zeros in between.
            flat = tf.nn.conv2d(dy, turned, 1, "VALID")
            return windows.spread(lambda i, j: flat)
        return _joined(_by_sample(convolve, _patches([height, width], turned, dy.shape[0]), dy))

    return _by_group(group, channels // kernel.shape[2], kernel, dy)


@register("Conv2DBackpropFilter")
def kernel_gradient(
    op: tf.Operation, x: tf.Tensor, kernel_shape: tf.Tensor, dy: tf.Tensor
) -> tf.Tensor:
    """A convolution of the inputs with the gradients as its kernel, channels being the samples."""
    height, width, channels, _ = (int(n) for n in tf.get_static_value(kernel_shape))
    batch, *size, x_channels = static_shape(x)
    windows = _windows(op, size, dy, [height, width])
    positions = windows.count[0] * windows.count[1]

    def group(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        if height == width == 1:
            rows = tf.reshape(windows.tap(windows.pad(x), 0, 0), [batch * positions, channels])
            filters = dy.shape[3]
            dy = tf.reshape(dy, [batch * positions, filters])
            return tf.reshape(product_over_rows(rows, dy), [1, 1, channels, filters])
        patches = 4 * channels * height * width * positions * batch
        total = functools.reduce(operator.add, _by_sample(convolve, patches, x, dy))
        return tf.transpose(total, [1, 2, 0, 3])

    def convolve(x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        images = tf.transpose(windows.pad(x), [3, 1, 2, 0])
        return tf.nn.conv2d(
            images,
            tf.transpose(dy, [1, 2, 0, 3]),
            windows.dilation,
            "VALID",
            dilations=windows.stride,
        )

    return _by_group(group, x_channels // channels, x, dy)


def _turned(kernel: tf.Tensor) -> tf.Tensor:
    """A kernel with its last row and column first.

    As one dimension: reversing two at once, interpreters before LiteRT do wrongly (2.14).
    """
    height, width, *channels = kernel.shape
    return tf.reshape(
        tf.reverse(tf.reshape(kernel, [height * width, *channels]), [0]), kernel.shape
    )


def _windows(op: tf.Operation, size: list[int], dy: tf.Tensor, kernel: list[int]) -> Windows:
    return Windows(op, size, dy.shape.as_list()[1:3], kernel)


def _between(windows: Windows, dy: tf.Tensor) -> tf.Tensor:
    """`dy` with zeros between and around, as a stride of 1 over it wants it."""
    for axis, step in enumerate(windows.stride):
        if step > 1:
            dy = _insert_zeros(dy, axis + 1, step)
    around = [(windows.kernel[k] - 1) * windows.dilation[k] for k in (0, 1)]
    return fit(
        dy,
        [windows.before[k] - around[k] for k in (0, 1)],
        [windows.size[k] + around[k] for k in (0, 1)],
    )


def _insert_zeros(x: tf.Tensor, axis: int, step: int) -> tf.Tensor:
    """`step - 1` zeros between neighbours along an axis."""
    shape = x.shape.as_list()
    outer, length, inner = shape[:axis], shape[axis], shape[axis + 1 :]
    # Of three dimensions, since TensorFlow Lite pads five at most.
    flat = tf.reshape(x, [math.prod(outer) * length, 1, math.prod(inner)])
    apart = tf.pad(flat, [[0, 0], [0, step - 1], [0, 0]])
    return tf.reshape(apart, [*outer, length * step, *inner])


@register("DepthwiseConv2dNativeBackpropInput")
def depthwise_input_gradient(
    op: tf.Operation, x_shape: tf.Tensor, kernel: tf.Tensor, dy: tf.Tensor
) -> tf.Tensor:
    """As `input_gradient`, channel by channel."""
    _, height, width, channels = (int(n) for n in tf.get_static_value(x_shape))
    *size, _, multiplier = kernel.shape
    windows = _windows(op, [height, width], dy, size)
    _undilated(windows)
    # One gradient from each of the channels that were made of one.
    each = tf.reshape(_turned(kernel), [*size, channels * multiplier, 1])
    dx = _depthwise(_between(windows, dy), each, [1, 1])
    if multiplier == 1:
        return dx
    return tf.reduce_sum(tf.reshape(dx, [dx.shape[0], height, width, channels, multiplier]), -1)


@register("DepthwiseConv2dNativeBackpropFilter")
def depthwise_kernel_gradient(
    op: tf.Operation, x: tf.Tensor, kernel_shape: tf.Tensor, dy: tf.Tensor
) -> tf.Tensor:
    """As `kernel_gradient`, channels and samples being channels of one image."""
    height, width, channels, multiplier = (int(n) for n in tf.get_static_value(kernel_shape))
    batch = x.shape[0]
    windows = _windows(op, x.shape.as_list()[1:3], dy, [height, width])
    _undilated(windows)
    padded = windows.pad(x)
    image = tf.reshape(
        tf.transpose(padded, [1, 2, 0, 3]), [1, *padded.shape[1:3], batch * channels]
    )
    kernel = tf.reshape(
        tf.transpose(dy, [1, 2, 0, 3]), [*windows.count, batch * channels, multiplier]
    )
    sums = _depthwise(image, kernel, windows.stride)
    sums = tf.reshape(sums, [height, width, batch, channels * multiplier])
    return tf.reshape(tf.reduce_sum(sums, 2), [height, width, channels, multiplier])


def _depthwise(x: tf.Tensor, kernel: tf.Tensor, dilation: list[int]) -> tf.Tensor:
    # The raw operation, since tf.nn.depthwise_conv2d makes a dilation out of others.
    return tf.raw_ops.DepthwiseConv2dNative(
        input=x,
        filter=kernel,
        strides=[1, 1, 1, 1],
        padding="VALID",
        dilations=[1, *dilation, 1],
    )


def _undilated(windows: Windows) -> None:
    if windows.dilation != [1, 1]:
        # TensorFlow's own gradient leaves the dilation out of account on CPUs; Keras does not
        # use it.
        raise NotImplementedError("a depthwise convolution with dilations of its own")
