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
    register_layer,
    registered_layers,
    skip_reason,
    stock_class,
)

__all__ = [
    "KEEP",
    "REBUILD",
    "CompressedLayer",
    "activation",
    "attention",
    "compressed_class",
    "convolution",
    "dense",
    "dropout",
    "merging",
    "normalization",
    "pooling",
    "register_layer",
    "registered_layers",
    "skip_reason",
    "stock_class",
    "views",
]
