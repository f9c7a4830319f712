"""A model and its data, analyzed stock and compressed at several batch sizes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from bittrain_tf.analysis import Analysis, analyze
from bittrain_tf.analysis.builder import rows
from bittrain_tf.private import flatten_layers
from bittrain_tf.rewrite import classes_for_tracing, compressed_classes, stock_classes

STOCK, COMPRESSED = "stock", "compressed"
KINDS = (STOCK, COMPRESSED)


class Probe:
    """Analyses of one model, each made once.

    Args:
        model: A built and compiled model, compressed or not.
        x: Inputs.
        y: Targets.
    """

    def __init__(self, model: keras.Model, x: Any, y: Any) -> None:
        self.model, self.x, self.y = model, x, y
        self._classes = {
            STOCK: stock_classes(model),
            COMPRESSED: compressed_classes(model, "bitmap", None, {}),
        }
        self._analyses: dict[tuple[Any, ...], Analysis] = {}

    def batch(self, size: int) -> tuple[Any, Any]:
        """The first `size` samples, repeated if there are fewer."""

        def cut(array: Any) -> np.ndarray:
            return rows(np.asarray(array), size)

        return keras.tree.map_structure(cut, self.x), keras.tree.map_structure(cut, self.y)

    def analysis(self, kind: str, size: int) -> Analysis:
        """What a step keeps, of `"stock"` or `"compressed"` layers and `size` samples."""
        layers = [self.model, *flatten_layers(self.model)]
        flags = (*(x.trainable for x in layers), *(v.trainable for v in self.model.variables))
        key = (kind, size, flags)
        if key not in self._analyses:
            with classes_for_tracing(self.model, self._classes[kind]):
                self._analyses[key] = analyze(self.model, *self.batch(size))
        return self._analyses[key]

    def stock(self) -> AbstractContextManager[None]:
        """A `with` block in which the layers have their stock classes."""
        return classes_for_tracing(self.model, self._classes[STOCK])
