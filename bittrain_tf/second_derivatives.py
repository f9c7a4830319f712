"""Compressed layers have first derivatives only, and say so when asked for more."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(*_: Any) -> NoReturn:
    """Raise; stands in for the gradient of a gradient, where a silent zero would be wrong.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "A second derivative was asked for through a compressed layer, which has first "
        "derivatives only. Call bittrain_tf.restore(model) before computing it, or leave the "
        "layers concerned out with bittrain_tf.compress(model, filters=...)."
    )
