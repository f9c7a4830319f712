"""Compressed forms of Keras layers, one file a family. Importing a file registers its layers."""

from bittrain_tf.layers import (
    activation,
    attention,
    convolution,
    dense,
    dropout,
    merging,
    normalization,
    pooling,
    views,
)
from bittrain_tf.layers.registry import (
    KEEP,
    REBUILD,
    CompressedLayer,
    compressed_class,
    has_form,
    register_layer,
    registered_layers,
    skip_reason,
    stock_class,
)
from bittrain_tf.layers.rerun import Rerun

__all__ = [
    "KEEP",
    "REBUILD",
    "CompressedLayer",
    "Rerun",
    "activation",
    "attention",
    "compressed_class",
    "convolution",
    "dense",
    "dropout",
    "has_form",
    "merging",
    "normalization",
    "pooling",
    "register_layer",
    "registered_layers",
    "skip_reason",
    "stock_class",
    "views",
]
