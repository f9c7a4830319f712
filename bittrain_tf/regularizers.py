"""Regularizers of activities: the sparser a layer's output, the less of it is kept.

Any Keras regularizer can be an `activity_regularizer`, but the gradient of Keras's own
keeps the dense output, which voids what compression saves of it. These keep it as the
layer's other readers do.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from bittrain_tf import recipes
from bittrain_tf.private import recorded


class _ActivityRegularizer(keras.regularizers.Regularizer):
    """A penalty on a layer's output."""

    def __init__(self, strength: float = 0.01) -> None:
        """Make the penalty.

        Args:
            strength: Its factor in the loss, 0 or more.

        Raises:
            ValueError: If `strength` is negative or not finite.
        """
        if not (isinstance(strength, int | float) and 0 <= strength < math.inf):
            raise ValueError(
                f"strength must be a finite number of 0 or more, got {strength!r}. "
                "It is the factor of the penalty in the loss; 0.01 by default."
            )
        self.strength = float(strength)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        """The penalty, a scalar, float32 at least, summed over the samples (Keras divides)."""

        def penalty(x: tf.Tensor) -> tf.Tensor:
            # Sums of a large output are beyond what float16 holds.
            return self._penalty(ops.cast(x, keras.backend.result_type(x.dtype, "float32")))

        return self.strength * (recipes.consume(penalty, x) if recorded(x) else penalty(x))

    def get_config(self) -> dict[str, Any]:
        """What it is made of again."""
        return {"strength": self.strength}

    def _penalty(self, x: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError


@keras.saving.register_keras_serializable("bittrain_tf")
class ActivityL1(_ActivityRegularizer):
    """The sum of the absolute values of an output, as `keras.regularizers.L1` has it.

    Use it as `activity_regularizer=` of a layer.
    """

    def _penalty(self, x: tf.Tensor) -> tf.Tensor:
        return ops.sum(ops.abs(x))


@keras.saving.register_keras_serializable("bittrain_tf")
class Hoyer(_ActivityRegularizer):
    """The Hoyer-Square measure of each sample's output, as a share of its size.

    Of `n` elements it is `sum(|x|)**2 / (n * sum(x**2))` (Yang, Wen and Li, "DeepHoyer",
    arXiv 1908.09979, divided by `n`): the density where all that are not zero
    are equal, less where they differ, and 0 for a sample of zeros. Scaling the output does
    not change it, so it makes outputs sparse and not small. Unlike L1, it is
    of the same range for layers of any size.

    Use it as `activity_regularizer=` of a layer.
    """

    def _penalty(self, x: tf.Tensor) -> tf.Tensor:
        samples = ops.reshape(x, (ops.shape(x)[0], -1))
        size = ops.cast(ops.shape(samples)[1], x.dtype)
        of_samples = ops.divide_no_nan(
            ops.square(ops.sum(ops.abs(samples), axis=1)),
            size * ops.sum(ops.square(samples), axis=1),
        )
        return ops.sum(of_samples)
