"""Train Keras models in less memory, with the same gradients."""

from bittrain_tf.analysis import analyze, measure, report
from bittrain_tf.codecs import register_codec
from bittrain_tf.layers import register_layer
from bittrain_tf.rewrite import compress, compressed, restore

__version__ = "0.1.0"

__all__ = [
    "analyze",
    "compress",
    "compressed",
    "measure",
    "register_codec",
    "register_layer",
    "report",
    "restore",
]
