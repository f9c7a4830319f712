"""What a codec is, and the table of the known ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Codec(Protocol):
    """Turns a tensor into parts that take less memory, and back, bit for bit.

    Attributes:
        name: The name users pass as `codec=`.
        lossless: Whether `decode(encode(x))` has the bits of `x`.
        op_sets: The op sets it is written for (`"tensorflow"`, `"litert"`).
    """

    name: str
    lossless: bool
    op_sets: tuple[str, ...]

    def encode(self, x: tf.Tensor, support: tf.Tensor | None = None) -> tuple[tf.Tensor, ...]:
        """Encode `x`.

        Args:
            x: Floating-point tensor of any shape.
            support: A packed mask of `x`'s size that is kept anyway and is likely,
                but not certain, to mark exactly the non-zeros of `x`.

        Returns:
            The tensors to keep; the last has the dtype of `x`.
        """

    def decode(
        self, parts: Sequence[tf.Tensor], shape: tf.TensorShape | tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor:
        """The tensor of `shape` and `dtype` that `parts` came from."""

    def nbytes(self, size: int, dtype: tf.DType, density: float) -> int:
        """Bytes kept for `size` elements of which the share `density` is non-zero."""


def shared_function(*signature: tf.TensorSpec) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: trace once, and call rather than inline wherever it is used.

    A codec is some tens of operations and is used twice for every activation. Inlined,
    it triples the graph of a ResNet50 and the memory TensorFlow needs to hold it, which
    is as much as the activations save.
    """
    return tf.function(
        input_signature=list(signature),
        autograph=False,
        experimental_attributes={"_noinline": True},
    )


_CODECS: dict[str, Codec] = {}


def register_codec(name: str) -> Callable[[type], type]:
    """Class decorator: make a `Codec` available as `codec=name`.

    Raises:
        ValueError: If the name is taken.
    """

    def register(cls: type) -> type:
        if name in _CODECS:
            raise ValueError(
                f"A codec named {name!r} is already registered "
                f"({type(_CODECS[name]).__name__}); choose another name."
            )
        cls.name = name
        _CODECS[name] = cls()
        return cls

    return register


def get_codec(name: Any) -> Codec:
    """The codec registered as `name`.

    Raises:
        ValueError: If there is none.
    """
    if not isinstance(name, str) or name not in _CODECS:
        raise ValueError(
            f"Unknown codec {name!r}; expected one of {sorted(_CODECS)}. "
            "A codec of your own is added with bittrain_tf.register_codec(name)."
        )
    return _CODECS[name]
