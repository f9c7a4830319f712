"""The codec that stores a tensor as it is: the reference the others are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from bittrain_tf.codecs.base import register_codec


@register_codec("dense")
class DenseCodec:
    """Keeps the tensor itself; no saving, no cost."""

    name: str
    lossless = True
    op_sets = ("tensorflow", "litert")

    def encode(self, x: tf.Tensor, support: tf.Tensor | None = None) -> tuple[tf.Tensor, ...]:
        return (x,)

    def decode(
        self, parts: Sequence[tf.Tensor], shape: tf.TensorShape | tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor:
        (x,) = parts
        return x

    def nbytes(self, size: int, dtype: tf.DType, density: float) -> int:
        return size * dtype.size
