"""The gradient of any TensorFlow function, by TensorFlow's own gradient operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def vjp(fn: Callable[..., Any], inputs: Sequence[tf.Tensor], dy: Any) -> list[tf.Tensor | None]:
    """The vector-Jacobian product of `fn` at `inputs` with `dy`.

    `dy` is a tensor, or as many as `fn` returns.

    Returns:
        The gradient for each of `inputs`; None for one that `fn` does not depend on.
    """
    # One tensor may be two of the inputs, and each is to have its own gradient.
    inputs = [tf.identity(x) for x in inputs]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(inputs)
        y = fn(*inputs)
    return tape.gradient(y, inputs, output_gradients=dy)
