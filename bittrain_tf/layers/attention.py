"""Attention: its projections are kept, the scores computed again from them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from bittrain_tf import ledger
from bittrain_tf.layers.registry import REBUILD, CompressedLayer, register_layer
from bittrain_tf.layers.rerun import rerun


@register_layer(keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
class CompressedAttention(CompressedLayer):
    """`MultiHeadAttention` and `GroupQueryAttention`, whose scores are quadratic in the length.

    Stock keeps the scores, their softmax and its dropout. They are rebuilt by choice, or where
    what is kept is pruned, at the price of two of the six products of the backward pass.
    """

    def _compute_attention(self, *args: Any, **kwargs: Any) -> Any:
        # The hook Keras documents for computing attention another way.
        attend = super()._compute_attention
        tensors = [t for t in keras.tree.flatten((list(args), kwargs)) if tf.is_tensor(t)]
        read = [t for t in tensors if t.dtype.is_floating]
        for x in read:
            self.prune_kept(x)
        if self.choice == REBUILD or self.prunes_kept:
            return rerun(self, attend, args, kwargs)
        result, scores = attend(*args, **kwargs)
        entries = ledger.current()
        if entries is not None:
            result = entries.inside(self, result, read)
        return result, scores
