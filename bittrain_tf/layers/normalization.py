"""Normalization layers: the input, kept once, by its recipe."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from bittrain_tf import native, recipes
from bittrain_tf.backward.normalization import batch_norm_gradient, sample_norm_gradient
from bittrain_tf.backward.vjp import vjp
from bittrain_tf.layers.registry import CompressedLayer, own_variables, register_layer
from bittrain_tf.layers.rerun import with_weights
from bittrain_tf.private import recorded, recording


@register_layer(keras.layers.BatchNormalization)
class CompressedBatchNormalization(CompressedLayer):
    """`BatchNormalization`: a backward pass of two or three tensors where stock takes nine."""

    prunes_normalized = True

    def call(
        self, inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None
    ) -> tf.Tensor:
        if mask is not None or not recording():
            return super().call(inputs, training=training, mask=mask)
        scale_and_offset = [
            tf.convert_to_tensor(v) for v in (self.gamma, self.beta) if v is not None
        ]
        if not recorded(inputs, *scale_and_offset):
            return super().call(inputs, training=training)
        if training and self.trainable:
            return self._normalize_by_batch(inputs, *scale_and_offset)
        if self.gamma is not None and self.gamma.trainable and recorded(scale_and_offset[0]):
            if self.prunes_kept:
                self._prune_deviation(inputs, self.moving_mean, self.moving_variance)
            return recipes.consume(self._normalize_by_moving, inputs, *scale_and_offset)
        return super().call(inputs, training=training)  # a linear map: nothing to keep

    def _normalize_by_moving(self, x: tf.Tensor, *scale_and_offset: tf.Tensor) -> tf.Tensor:
        x = ops.cast(x, _compute_dtype(x))
        mean = tf.stop_gradient(ops.cast(self.moving_mean, x.dtype))
        variance = tf.stop_gradient(ops.cast(self.moving_variance, x.dtype))
        return self._transform(x, mean, variance, *scale_and_offset)

    def _normalize_by_batch(self, inputs: tf.Tensor, *scale_and_offset: tf.Tensor) -> tf.Tensor:
        axes = [i for i in range(inputs.shape.rank) if i != self.axis % inputs.shape.rank]
        if self.prunes_kept:
            x = ops.cast(tf.stop_gradient(inputs), _compute_dtype(inputs))
            self._prune_deviation(inputs, *ops.moments(x, axes=axes))
        kept = recipes.keep(inputs)
        (x,) = recipes.detach([inputs], [kept])
        x = ops.cast(x, _compute_dtype(inputs))
        mean, variance = ops.moments(x, axes=axes)
        for moving, batch in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign(ops.cast(moving, x.dtype) * self.momentum + batch * (1.0 - self.momentum))
        arguments = [inputs, *scale_and_offset]

        def normalize(x: tf.Tensor, *scale_and_offset: tf.Tensor) -> tf.Tensor:
            x = ops.cast(x, _compute_dtype(x))
            return self._transform(x, mean, variance, *scale_and_offset)

        # With the stock operations, whatever the gradient: TensorFlow's graph optimizer takes
        # them apart and adds in another order, which is to be that of the stock model.
        y = normalize(x, *scale_and_offset)
        if self._is_native(inputs):
            gamma = scale_and_offset[0] if self.gamma is not None else None
            beta = scale_and_offset[-1] if self.beta is not None else None
            inv_std = tf.math.rsqrt(variance + self.epsilon)
            recipe = _Normalized(inputs, x, kept, mean, inv_std, gamma, beta)
            return recipes.attach(recipe.with_gradient(y), recipe)
        gradient = self._gradient(mean, variance, *scale_and_offset)
        y = recipes.with_gradient(y, arguments, [kept], gradient)
        # The input is kept anyway, so readers of the output need keep nothing.
        return recipes.attach(y, recipes.Derived(normalize, arguments, sources_kept=True))

    def _prune_deviation(self, x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Keep of `x` what is far from its mean, as measured by its deviation."""
        broadcast = [1] * x.shape.rank
        broadcast[self.axis] = -1
        mean, variance = (tf.reshape(t, broadcast) for t in (mean, variance))
        self.prune_kept(x, mean, tf.math.rsqrt(variance + self.epsilon))

    def _is_native(self, x: tf.Tensor) -> bool:
        last = self.axis % x.shape.rank == x.shape.rank - 1
        single = x.dtype == tf.float32 and self.compute_dtype == "float32"
        return last and single and native.available()

    def _gradient(
        self, mean: tf.Tensor, variance: tf.Tensor, *scale_and_offset: tf.Tensor
    ) -> Callable[..., list[tf.Tensor]]:
        scaled, centred, axis, epsilon = (
            self.gamma is not None,
            self.beta is not None,
            self.axis,
            self.epsilon,
        )

        def gradient(dy: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
            gradients = batch_norm_gradient(
                tf.cast(dy, mean.dtype),
                tf.cast(x, mean.dtype),
                mean,
                variance,
                tf.cast(scale_and_offset[0], mean.dtype) if scaled else None,
                axis,
                epsilon,
            )
            wanted = [gradients[0], *gradients[1:2][:scaled], *gradients[2:][:centred]]
            dtypes = [x.dtype, *(t.dtype for t in scale_and_offset)]
            return [tf.cast(g, dtype) for g, dtype in zip(wanted, dtypes, strict=True)]

        return gradient

    def _transform(
        self,
        x: tf.Tensor,
        mean: tf.Tensor,
        variance: tf.Tensor,
        *scale_and_offset: tf.Tensor,
    ) -> tf.Tensor:
        weights = [ops.cast(t, x.dtype) for t in scale_and_offset]
        y = ops.batch_normalization(
            x=x,
            mean=mean,
            variance=variance,
            axis=self.axis,
            scale=weights.pop(0) if self.gamma is not None else None,
            offset=weights.pop(0) if self.beta is not None else None,
            epsilon=self.epsilon,
        )
        return ops.cast(y, self.compute_dtype)

    @staticmethod
    def skip_reason(layer: keras.layers.Layer) -> str | None:
        if layer.synchronized:
            return "synchronized across replicas, which only the stock layer does"
        if getattr(layer, "renorm", False):
            return "batch renormalization, which only the stock layer does"
        return None


class _SampleNormalization(CompressedLayer):
    """Normalizations within a sample: of them stock keeps several tensors, here the input."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        normalize = super().call
        trained = map(tf.convert_to_tensor, self.trainable_variables)
        if not (recording() and recorded(inputs, *trained)):
            return normalize(inputs)
        variables = own_variables(self)
        weights = [tf.convert_to_tensor(v) for v in variables]
        fn = with_weights(normalize, variables)
        return self._normalize(fn, inputs, *weights)

    def _normalize(
        self, fn: Callable[..., tf.Tensor], x: tf.Tensor, *weights: tf.Tensor
    ) -> tf.Tensor:
        y = recipes.keep_inputs(fn, x, *weights)
        return self.leave(y, fn, x, *weights, rebuilt=True)


@register_layer(keras.layers.GroupNormalization, keras.layers.UnitNormalization)
class CompressedSampleNormalization(_SampleNormalization):
    """`GroupNormalization` and `UnitNormalization`; their input is never pruned."""

    prunes_normalized = True


@register_layer(keras.layers.LayerNormalization, keras.layers.RMSNormalization)
class CompressedLayerNormalization(_SampleNormalization):
    """`LayerNormalization` and `RMSNormalization`."""

    prunes_normalized = True

    def _normalize(
        self, fn: Callable[..., tf.Tensor], x: tf.Tensor, *weights: tf.Tensor
    ) -> tf.Tensor:
        if not self.prunes_kept or getattr(self, "rms_scaling", False):
            return super()._normalize(fn, x, *weights)
        # The statistics are kept, for what is left of the input has others.
        axes = [axis % x.shape.rank for axis in keras.tree.flatten(self.axis)]
        source = ops.cast(tf.stop_gradient(x), _compute_dtype(x))
        centred = isinstance(self, keras.layers.LayerNormalization)
        if centred:
            mean, square = ops.moments(source, axes=axes, keepdims=True)
        else:
            mean, square = None, ops.mean(ops.square(source), axis=axes, keepdims=True)
        inv_std = tf.math.rsqrt(square + self.epsilon)
        self.prune_kept(x, mean, inv_std)
        kept = recipes.keep(x)
        (detached,) = recipes.detach([x], [kept])
        broadcast = [size if i in axes else 1 for i, size in enumerate(x.shape)]

        def normalized(x: tf.Tensor) -> tf.Tensor:
            x = ops.cast(x, inv_std.dtype)
            return (x if mean is None else x - mean) * inv_std

        def affine(normalized: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            factors = [tf.cast(tf.reshape(w, broadcast), normalized.dtype) for w in weights]
            if not centred or self.scale:
                normalized = normalized * factors.pop(0)
            return ops.cast(normalized + sum(factors), self.compute_dtype)

        def gradient(dy: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
            x_hat = normalized(x)
            dy_hat, *of_weights = vjp(affine, [x_hat, *weights], dy)
            dx = sample_norm_gradient(dy_hat, x_hat, inv_std, axes, centred=centred)
            return [tf.cast(dx, x.dtype), *of_weights]

        y = recipes.with_gradient(fn(detached, *weights), [x, *weights], [kept], gradient)

        def again(x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
            return affine(normalized(x), *weights)

        return self.leave(y, again, x, *weights, rebuilt=True)


class _Normalized(recipes.Derived):
    """A batch normalized by its own statistics, with the native kernels.

    Args:
        source: The batch.
        x: The same without its gradient, available once what is kept of it is.
        kept: What is kept of it.
        mean: Its mean, `[channels]`.
        inv_std: The inverse of its standard deviation, likewise.
        gamma: The scale, or None.
        beta: The offset, or None.
    """

    def __init__(
        self,
        source: tf.Tensor,
        x: tf.Tensor,
        kept: recipes.Kept,
        mean: tf.Tensor,
        inv_std: tf.Tensor,
        gamma: tf.Tensor | None,
        beta: tf.Tensor | None,
    ) -> None:
        # In the order of tf.nn.batch_normalization, for the same bits.
        scale = inv_std if gamma is None else inv_std * gamma
        offset = -mean * scale if beta is None else beta - mean * scale
        super().__init__(lambda x: native.normalize(x, scale, offset), [source], sources_kept=True)
        self._x, self._kept_source = x, kept
        self._mean, self._inv_std = mean, inv_std
        self._gamma, self._beta = gamma, beta
        self._scale, self._offset = scale, offset

    def rectified(self, limit: float) -> recipes.Rectified | None:
        if tf.executing_eagerly():
            return None  # the output has been computed; in a graph nobody then asks for it
        scale, offset = self._scale, self._offset
        y, packed = native.normalize_and_rectify(self._x, scale, offset, limit=limit, marked=True)
        passes, y = recipes.keep_mask(packed, y)

        def again(x: tf.Tensor) -> tf.Tensor:
            return native.normalize_and_rectify(x, scale, offset, limit=limit, marked=False)[0]

        return recipes.Rectified(self.with_gradient(y, passes), packed, again, *self.sources)

    def with_gradient(self, y: tf.Tensor, *passes: recipes.Kept) -> tf.Tensor:
        """`y`, with the gradient of the normalized batch, or of that where the mask is set."""
        mean, inv_std, scale = self._mean, self._inv_std, self._scale
        weights = [w for w in (self._gamma, self._beta) if w is not None]
        scaled, centred = self._gamma is not None, self._beta is not None

        def gradient(dy: tf.Tensor, x: tf.Tensor, *packed: tf.Tensor) -> list[tf.Tensor]:
            mask = packed[0] if packed else None
            dx, dgamma, dbeta = native.normalize_gradient(dy, mask, x, mean, inv_std, scale)
            return [dx, *[dgamma][:scaled], *[dbeta][:centred]]

        return recipes.with_gradient(
            y, [*self.sources, *weights], [self._kept_source, *passes], gradient
        )


def _compute_dtype(x: tf.Tensor) -> str:
    return keras.backend.result_type(x.dtype, "float32")
