"""The gradient of any TensorFlow function, by TensorFlow's own gradient operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf


def vjp(
    fn: Callable[..., tf.Tensor], inputs: Sequence[tf.Tensor], dy: tf.Tensor
) -> list[tf.Tensor | None]:
    """The vector-Jacobian product of `fn` at `inputs` with `dy`.

    Returns:
        The gradient for each of `inputs`; None for one that `fn` does not depend on.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(inputs))
        y = fn(*inputs)
    return tape.gradient(y, list(inputs), output_gradients=dy)
