"""Native kernels: what the codec and the layers do, in one operation each, on CPUs.

All of it can be had from TensorFlow operations too, with the same result but in
more time and temporary memory, so nothing depends on their being available.
"""

from bittrain_tf.native.kernels import (
    available,
    choose,
    decode,
    encode,
    mark_positive,
    mark_true,
    max_pool,
    max_pool_gradient,
    multiply,
    normalize,
    normalize_and_rectify,
    normalize_gradient,
)
from bittrain_tf.native.load import native

__all__ = [
    "available",
    "choose",
    "decode",
    "encode",
    "mark_positive",
    "mark_true",
    "max_pool",
    "max_pool_gradient",
    "multiply",
    "native",
    "normalize",
    "normalize_and_rectify",
    "normalize_gradient",
]
