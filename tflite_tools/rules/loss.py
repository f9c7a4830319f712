"""Losses that TensorFlow has as one operation, which also makes their gradient."""

from __future__ import annotations

import tensorflow as tf

from tflite_tools.rules.registry import register


@register("SoftmaxCrossEntropyWithLogits")
def softmax_cross_entropy(
    op: tf.Operation, logits: tf.Tensor, labels: tf.Tensor
) -> list[tf.Tensor]:
    """The loss of each row, and its gradient."""
    loss = -tf.reduce_sum(labels * tf.nn.log_softmax(logits), axis=-1)
    return [loss, tf.nn.softmax(logits) - labels]


@register("SparseSoftmaxCrossEntropyWithLogits")
def sparse_softmax_cross_entropy(
    op: tf.Operation, logits: tf.Tensor, labels: tf.Tensor
) -> list[tf.Tensor]:
    """The same by the number of the class."""
    one_hot = tf.one_hot(tf.cast(labels, tf.int32), logits.shape[-1], dtype=logits.dtype)
    return softmax_cross_entropy(op, logits, one_hot)
