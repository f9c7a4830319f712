"""What is pruned of one layer, and how far that has got: stored with the layer's weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import keras
import tensorflow as tf

from bittrain_tf.pruning.quantile import CHANNEL, like, magnitudes, quantile

FORWARD, SAVED = "forward", "saved"
_RATE = 0.3  # at which running means follow


class Pruning(keras.layers.Layer):
    """The pruning of one layer's activations: a part of that layer, with weights of its own.

    Args:
        mode: `"forward"` if the layer's output is pruned, `"saved"` if what it keeps is.
        target_sparsity: The share of zeros to reach.
        begin: The steps of training before pruning begins.
        ramp: The steps of training in which the target is then reached.
        per: What has a threshold of its own; see `quantile.magnitudes`.
        **options: Those of any Keras layer.

    Attributes:
        thresholds: Running mean of the thresholds, `[thresholds]`; only of outputs.
        step: How many steps of training have been taken.
        sparsity: Running mean of the share of zeros.
    """

    def __init__(
        self,
        *,
        mode: str,
        target_sparsity: float,
        begin: int,
        ramp: int,
        per: str,
        **options: Any,
    ) -> None:
        super().__init__(**{"dtype": "float32", "trainable": False, "name": "pruning", **options})
        self.mode, self.target_sparsity = mode, target_sparsity
        self.begin, self.ramp, self.per = begin, ramp, per

    def build(self, count: int = 1) -> None:
        """Make the weights.

        Args:
            count: The number of thresholds.
        """
        # Outside of any graph that is being written: they outlive it.
        with tf.init_scope():
            if self.mode == FORWARD:
                self.thresholds = self._weight("thresholds", (count,), "float32")
            self.step = self._weight("step", (), "int64")
            self.sparsity = self._weight("sparsity", (), "float32")
        self.built = True

    def _weight(self, name: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
        return self.add_weight(
            shape=shape,
            initializer="zeros",
            dtype=dtype,
            trainable=False,
            autocast=False,
            aggregation="mean" if dtype == "float32" else "only_first_replica",
            name=name,
        )

    def _share(self, step: tf.Tensor) -> tf.Tensor:
        """The share to prune at a step, rising as in Zhu and Gupta (arXiv 1710.01878)."""
        since = tf.cast(step - self.begin, tf.float32)
        progress = tf.minimum(since / self.ramp, 1.0) if self.ramp else 1.0
        return tf.where(since >= 0, self.target_sparsity * (1.0 - (1.0 - progress) ** 3), 0.0)

    def output_threshold(self, y: tf.Tensor, *, training: bool) -> tf.Tensor:
        """The magnitude up to which an output of the layer is pruned.

        A running mean of quantiles, so that training uses what inference will.

        Args:
            y: The output.
            training: Whether to learn from it; that is a step.

        Returns:
            Of the type of `y`, to be compared with it.
        """
        if not self.built:
            self.build(y.shape[-1] if self.per == CHANNEL else 1)
        now = tf.convert_to_tensor(self.thresholds)
        if training:
            step = tf.convert_to_tensor(self.step)
            self.advance()
            found = magnitudes(y, step, self.per)
            wanted = quantile(found, self._share(step))
            # No mean until pruning has begun; and once it has, no NaN in it.
            mean = tf.where(now > 0, now + _RATE * (wanted - now), wanted)
            now = tf.where(tf.math.is_finite(wanted), mean, now)
            self.thresholds.assign(now)
            self._note(found <= now)
        return like(now, y, self.per)

    def kept_threshold(self, x: tf.Tensor) -> tf.Tensor:
        """The magnitude up to which a tensor that the layer keeps is pruned.

        Args:
            x: The tensor.

        Returns:
            Of the type of `x`, to be compared with it.
        """
        step = tf.convert_to_tensor(self.step)
        found = magnitudes(x, step, self.per)
        wanted = quantile(found, self._share(step))
        self._note(found <= wanted)
        return like(wanted, x, self.per)

    def advance(self) -> None:
        """Count a step of training."""
        self.step.assign_add(1)

    def _note(self, zeros: tf.Tensor) -> None:
        """Note which of the elements looked at are zero."""
        found = tf.reduce_mean(tf.cast(zeros, tf.float32))
        before = tf.convert_to_tensor(self.sparsity)
        mean = tf.where(before > 0, before + _RATE * (found - before), found)
        # Of no elements there is no share.
        self.sparsity.assign(tf.where(tf.math.is_finite(found), mean, before))

    def get_config(self) -> dict[str, Any]:
        """What it is made of again."""
        return {
            "mode": self.mode,
            "target_sparsity": self.target_sparsity,
            "begin": self.begin,
            "ramp": self.ramp,
            "per": self.per,
        }

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Store the weights by name."""
        for variable in self.weights:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Take the weights from a store; from one without, as a stock model's, none.

        Raises:
            ValueError: If they do not belong to pruning like this.
        """
        stored = {name: store[name] for name in store.keys()}  # noqa: SIM118
        if not stored:
            return
        names = {"step", "sparsity"} | ({"thresholds"} if self.mode == FORWARD else set())
        if set(stored) != names:
            raise ValueError(
                f"The weights stored are of pruning in another mode: {sorted(stored)}, where "
                f"mode={self.mode!r} has {sorted(names)}. Use ActivationPruning with the mode "
                "of the training that wrote the file."
            )
        count = len(stored.get("thresholds", (0,)))
        if not self.built:
            self.build(count)
        if self.mode == FORWARD and tuple(self.thresholds.shape) != (count,):
            raise ValueError(
                f"{count} thresholds are stored, and per={self.per!r} has "
                f"{self.thresholds.shape[0]} here. Use ActivationPruning with the `per` of the "
                "training that wrote the file."
            )
        for variable in self.weights:
            variable.assign(stored[variable.name])
