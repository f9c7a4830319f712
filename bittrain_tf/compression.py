"""`compress`: turning compression on for a model, within a budget if one is given."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from bittrain_tf import allocator
from bittrain_tf.analysis.plan import plan
from bittrain_tf.codecs import get_codec
from bittrain_tf.layers import stock_class
from bittrain_tf.private import PART, add_part, flatten_layers
from bittrain_tf.rewrite import Filters, check_model, compressed_classes, switch


def compress(
    model: keras.Model,
    *,
    memory_budget: float | int | None = None,
    time_budget: float | None = None,
    sample: tuple[Any, ...] | None = None,
    codec: str = "bitmap",
    filters: Filters | None = None,
) -> keras.Model:
    """Make a model keep its activations for the backward pass in less memory.

    Outputs and gradients stay what they are. The model is changed in place and can
    be trained as before: `fit`, `train_on_batch`, `tf.GradientTape`. Files saved from
    it are plain Keras files. Layers that cannot be compressed stay as they are; see
    `bittrain_tf.report`. A second call with the same options changes nothing.

    On Linux, glibc's allocator is also told to return large tensors to the system when they
    are freed, for the whole process (see docs/memory.md), unless the environment sets
    `MALLOC_MMAP_THRESHOLD_`.

    By default a layer's output is rebuilt where that takes next to no time, and kept
    else. A budget has `bittrain_tf.plan` choose, layer by layer.

    Args:
        model: A built Keras model, compiled or not.
        memory_budget: The peak of live bytes allowed to a training step above the resident
            model: a float, as a share of the stock model's; or an int, in bytes.
        time_budget: The time allowed to a step, as a ratio to the stock model's.
        sample: One batch `(x,)` or `(x, y)` to plan for. By default a batch of 32 samples
            of the shapes the model was built for, with half of the values zero.
        codec: How sparse activations are kept: `"bitmap"` (1 bit an element and the
            non-zeros) or `"dense"` (as they are, for comparison).
        filters: Which layers to compress: a regular expression searched in the layer
            names, a list of names, or a function of the layer. All by default.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is no Keras model, or `filters` of no known kind.
        ValueError: If the model is not built, the codec unknown, the filter matches
            nothing, an argument is out of range, or a budget cannot be met; then with
            the lowest that can.
    """
    check_model(model)
    get_codec(codec)
    if sample is not None and not (isinstance(sample, tuple | list) and len(sample) in (1, 2)):
        raise ValueError(
            f"sample is one batch as a tuple, (x,) or (x, y); got a {type(sample).__name__}."
        )
    choices, has_budget = {}, memory_budget is not None or time_budget is not None
    if has_budget:
        choices = plan(
            model,
            *(() if sample is None else sample),
            memory_budget=memory_budget,
            time_budget=time_budget,
            codec=codec,
            filters=filters,
        ).choices
    elif sample is not None:
        raise ValueError(
            "sample is what to plan for; give memory_budget or time_budget with it, or leave "
            "it out."
        )
    classes = compressed_classes(model, codec, filters, choices)
    if all(cls is stock_class(layer) for layer, cls in classes.items()):
        warnings.warn(
            f"No layer of model {model.name!r} can be compressed; "
            "bittrain_tf.report(model) says why for each.",
            stacklevel=2,
        )
    switch(model, classes)
    allocator.map_large(for_budget=has_budget)
    return model


@contextlib.contextmanager
def compressed(model: keras.Model, **options: Any) -> Iterator[keras.Model]:
    """`compress` within a `with` block; afterwards the model is what it was before.

    Args:
        model: See `compress`.
        **options: See `compress`.
    """
    is_model = isinstance(model, keras.Model)
    before = {layer: type(layer) for layer in flatten_layers(model)} if is_model else {}
    pruned = {layer: vars(layer)[PART] for layer in before if PART in vars(layer)}
    try:
        yield compress(model, **options)
    finally:
        switch(model, before)
        for layer, pruning in pruned.items():
            if PART not in vars(layer):
                add_part(layer, pruning)
