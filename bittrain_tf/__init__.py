"""Train Keras models in less memory, with the same gradients."""

from bittrain_tf.analysis import analyze, measure, plan, report
from bittrain_tf.codecs import register_codec
from bittrain_tf.compression import compress, compressed
from bittrain_tf.investigation import investigate
from bittrain_tf.layers import register_layer
from bittrain_tf.pruning.callback import ActivationPruning
from bittrain_tf.regularizers import ActivityL1, Hoyer
from bittrain_tf.rewrite import restore

__version__ = "0.1.0"

__all__ = [
    "ActivationPruning",
    "ActivityL1",
    "Hoyer",
    "analyze",
    "compress",
    "compressed",
    "investigate",
    "measure",
    "plan",
    "register_codec",
    "register_layer",
    "report",
    "restore",
]
