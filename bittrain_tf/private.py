"""The only non-public TensorFlow and Keras symbols this package uses, each with its reason.

Everything else goes through the public APIs, so a TensorFlow or Keras release
that moves one of these is repaired here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager import record


def recording() -> bool:
    """Whether a `tf.GradientTape` is active, so that a backward pass may follow.

    Inference must not pay for encoding, and neither the `training` argument (a
    fine-tuned backbone is called with `training=False`) nor any public function
    says whether gradients will be asked for.
    """
    return record.could_possibly_record()


def recorded(*tensors: tf.Tensor) -> bool:
    """Whether an active tape watches any of `tensors`.

    False for everything upstream of the first trainable weight: a frozen
    backbone keeps nothing, so it must not be made to encode anything.
    """
    return record.should_record_backprop(list(tensors))


def flatten_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """All sub-layers at any depth, without `layer` itself.

    `Model.layers` stops at the first level and composite layers
    (`Bidirectional`, `MultiHeadAttention`, ...) publish theirs under names of
    their own.
    """
    return layer._flatten_layers(include_self=False, recursive=True)


def has_keras_mask(*tensors: Any) -> bool:
    """Whether Keras attached a timestep mask to any of `tensors`.

    Merging layers read it from the tensor object, so such tensors cannot be
    replaced by others of the same value.
    """
    return any(getattr(t, "_keras_mask", None) is not None for t in tensors)
