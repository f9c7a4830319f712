"""The ways of training that are compared: each makes its model from a function that builds stock.

`make(build, batch_size)` returns `(compiled model, x, y)`; `build()` returns the stock ones.
"""

import dataclasses
import inspect
import math
import re
import statistics
from collections.abc import Callable

import keras

import bittrain_tf as bt
from benchmarks.peers.blocks import recomputed
from bittrain_tf.private import flatten_layers

_RATE, _LOSS = 0.01, "sparse_categorical_crossentropy"  # as bittrain_tf.analysis.builder
_MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training a model.

    Attributes:
        title: What the document calls it.
        make: See the module.
        micro_batches: Parts that a batch is trained in.
    """

    title: str
    make: Callable
    micro_batches: int = 1


def stock(build, batch_size):
    return build()


def nudged(build, batch_size):
    model, x, y = build()
    return compiled(model, rate=_RATE * (1 + 1e-6)), x, y


def compressed(**budget):
    def make(build, batch_size):
        model, x, y = build()
        sample = (x[:batch_size], y[:batch_size]) if budget else None
        bt.compress(model, sample=sample, **budget)
        return model, x, y

    return make


def remat(mode, with_training=True):
    def make(build, batch_size):
        options = {}
        if mode == "larger_than":
            options["output_size_threshold"] = median_output_size(build()[0])
        elif mode == "list_of_layers":
            options["layer_names"] = costly_layers(build()[0], with_training)
        # A model built only to choose would otherwise leave its names taken.
        keras.backend.clear_session()
        with keras.RematScope(mode=mode, **options):
            return build()

    return make


def median_output_size(model):
    """The elements of a layer's output, of one sample: half of the layers have more."""
    sizes = [
        math.prod(d or 1 for d in t.shape)
        for layer in model.layers
        for t in keras.tree.flatten(layer.output)
    ]
    return int(statistics.median(sizes))


def costly_layers(model, with_training):
    """The names of all convolutions, dense layers and activations.

    Without those called with `training=`, if need be: tf.recompute_grad takes no keyword
    arguments in a graph, and so RematScope fails with `Dense`.
    """
    kinds = re.compile("Conv|Dense|Activation|ReLU")
    return [
        layer.name
        for layer in flatten_layers(model)
        if kinds.search(type(layer).__name__)
        and (with_training or "training" not in inspect.signature(layer.call).parameters)
    ]


def recompute(build, batch_size):
    model, x, y = build()
    return compiled(recomputed(model)), x, y


def mixed(policy):
    def make(build, batch_size):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return build()
        finally:
            keras.config.set_dtype_policy(before)

    return make


def jit(build, batch_size):
    model, x, y = build()
    return compiled(model, jit_compile=True), x, y


def accumulate(build, batch_size):
    if batch_size % _MICRO_BATCHES:
        raise ValueError(f"A batch of {batch_size} has no {_MICRO_BATCHES} equal parts.")
    model, x, y = build()
    return compiled(model, gradient_accumulation_steps=_MICRO_BATCHES), x, y


def compiled(model, rate=_RATE, jit_compile=False, **options):
    """`model`, compiled anew."""
    optimizer = keras.optimizers.SGD(rate, **options)
    model.compile(optimizer, _LOSS, jit_compile=jit_compile)
    return model


STOCK = "stock"
WAYS = {
    STOCK: Way("stock", stock),
    # What becomes of a difference of rounding, and how far apart two measurements of one thing are.
    "control": Way("stock, rate raised by 1e-6", nudged),
    "compressed": Way("`bt.compress(model)`", compressed()),
    "compressed-1.05": Way("`bt.compress`, `time_budget=1.05`", compressed(time_budget=1.05)),
    "compressed-1.25": Way("`bt.compress`, `time_budget=1.25`", compressed(time_budget=1.25)),
    "compressed-half": Way("`bt.compress`, `memory_budget=0.5`", compressed(memory_budget=0.5)),
    "remat-full": Way('`RematScope("full")`', remat("full")),
    "remat-activations": Way('`RematScope("activations")`', remat("activations")),
    "remat-larger": Way('`RematScope("larger_than")`', remat("larger_than")),
    "remat-list": Way('`RematScope("list_of_layers")`', remat("list_of_layers")),
    "remat-list-some": Way(
        '`RematScope("list_of_layers")`, without `Dense`', remat("list_of_layers", False)
    ),
    "recompute": Way("`tf.recompute_grad`, each block", recompute),
    "float16": Way("`mixed_float16`", mixed("mixed_float16")),
    "bfloat16": Way("`mixed_bfloat16`", mixed("mixed_bfloat16")),
    "jit": Way("`jit_compile=True`", jit),
    "accumulate": Way(f"{_MICRO_BATCHES} micro-batches", accumulate, _MICRO_BATCHES),
}
