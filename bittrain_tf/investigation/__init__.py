"""Where the memory of training a model goes: one file for each part, the figures, the page."""

from bittrain_tf.investigation.investigate import investigate
from bittrain_tf.investigation.result import Investigation

__all__ = ["Investigation", "investigate"]
