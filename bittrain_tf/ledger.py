"""A list of what a traced forward pass lets its gradients keep, for the planner to read.

Layers and recipes enter what they do anyway; nothing is entered unless a ledger is open.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from bittrain_tf.private import custom_gradient

if TYPE_CHECKING:
    from bittrain_tf.recipes import Kept, Recipe


@dataclasses.dataclass(frozen=True)
class Offer:
    """An output that its readers can keep, or rebuild from what it was computed from.

    Attributes:
        layer: The layer that made it.
        y: The output.
        sources: What it was computed from.
        kept: The recipe that keeps it; None if it is kept as it is.
    """

    layer: object
    y: tf.Tensor
    sources: tuple[tf.Tensor, ...]
    kept: Recipe | None


@dataclasses.dataclass(eq=False)
class Gradient:
    """A gradient to be computed from what is kept.

    Attributes:
        inputs: The tensors it goes to.
        kept: What it needs.
        begun: How many operations the graph had when it was begun; None if it never was.
    """

    inputs: tuple[tf.Tensor, ...]
    kept: tuple[Kept, ...]
    begun: int | None = None


@dataclasses.dataclass(eq=False)
class Inside:
    """A computation whose intermediate tensors are kept, or rebuilt from its inputs.

    Attributes:
        layer: The layer that does it.
        y: Its result.
        inputs: What it is computed from.
        begun: See `Gradient`.
    """

    layer: object
    y: tf.Tensor
    inputs: tuple[tf.Tensor, ...]
    begun: int | None = None


class Ledger:
    """What has been entered.

    Attributes:
        offers: The outputs offered, by `id`.
        steps: The gradients to come, and computations that have one of TensorFlow's own.
        tensors: The tensor that each `Kept` is of, by `id`; one not listed is kept as such.
    """

    def __init__(self) -> None:
        self.offers: dict[int, Offer] = {}
        self.steps: list[Gradient | Inside] = []
        self.tensors: dict[int, tf.Tensor] = {}

    def offer(
        self, layer: object, y: tf.Tensor, sources: Sequence[tf.Tensor], kept: Recipe | None
    ) -> None:
        """Enter an `Offer`."""
        self.offers[id(y)] = Offer(layer, y, tuple(sources), kept)

    def gradient(self, inputs: Sequence[tf.Tensor], kept: Sequence[Kept]) -> Gradient:
        """Enter a `Gradient`; returns it."""
        entry = Gradient(tuple(inputs), tuple(kept))
        self.steps.append(entry)
        return entry

    def inside(self, layer: object, y: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Enter an `Inside`; returns `y`, whose gradient will say when it is begun."""
        entry = Inside(layer, y, tuple(inputs))
        self.steps.append(entry)

        def begun(dy: tf.Tensor) -> list[tf.Tensor]:
            self.begin(entry)
            return [dy]

        (marked,) = custom_gradient([y], [y], begun)
        return marked

    def begin(self, entry: Gradient | Inside) -> None:
        """Note that the gradient of an entry is begun."""
        entry.begun = len(tf.compat.v1.get_default_graph().get_operations())


_open: Ledger | None = None


def current() -> Ledger | None:
    """The ledger that is open, if one is."""
    return _open


@contextlib.contextmanager
def opened() -> Iterator[Ledger]:
    """A new ledger, open within the `with` block."""
    global _open
    before, _open = _open, Ledger()
    try:
        yield _open
    finally:
        _open = before
