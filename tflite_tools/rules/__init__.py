"""What TensorFlow Lite has no operator for, written with those that it has.

One rule an operation of TensorFlow, most of them gradients. To add one, write a function in the
file of its family and register it.
"""

from tflite_tools.rules import (
    activation,
    arrays,
    convolution,
    elementwise,
    loss,
    matrices,
    pooling,
    random,
    resizing,
)
from tflite_tools.rules.registry import Rule, find, register

__all__ = [
    "Rule",
    "activation",
    "arrays",
    "convolution",
    "elementwise",
    "find",
    "loss",
    "matrices",
    "pooling",
    "random",
    "register",
    "resizing",
]
