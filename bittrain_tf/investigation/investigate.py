"""`investigate`: where the memory of training a model goes (BitTrain, section 3, redone)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from bittrain_tf.investigation.formats import formats_side_by_side
from bittrain_tf.investigation.layer_types import kept_by_type
from bittrain_tf.investigation.memory import memory_by_batch
from bittrain_tf.investigation.probe import Probe
from bittrain_tf.investigation.result import PARTS, Investigation
from bittrain_tf.investigation.sparsity import sparsity_over_training
from bittrain_tf.investigation.trained_parts import trained_parts
from bittrain_tf.investigation.unchanged import unchanged
from bittrain_tf.rewrite import check_model

BATCH_SIZES = (1, 4, 16, 32)
EPOCHS = 3
STAGES = len(PARTS)


def investigate(
    model: keras.Model,
    x: Any,
    y: Any,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    epochs: int = EPOCHS,
    progress: Callable[[str], None] = lambda _: None,
) -> Investigation:
    """Where the memory of training `model` goes, stock and compressed.

    Steps are traced and their forward passes run; and the model is trained for some
    epochs. It comes back as it was: weights, optimizer, metrics, what is trainable, and
    whether it is compressed. A part that cannot be had says why, in `failures`.

    Args:
        model: A built and compiled Keras model, compressed or not.
        x: Inputs of all samples, as `model.fit` takes them: arrays, samples first.
        y: Their targets.
        batch_sizes: Numbers of samples to look at; samples are repeated if there are fewer.
            The largest is that of all parts that look at one, and of training.
        epochs: Epochs of training to watch sparsity over; 0 for none.
        progress: Called as each part begins, with what it is.

    Returns:
        The figures; see `Investigation`.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the model is not built or not compiled, an argument is out of range,
            or no part could be had.
    """
    check_model(model)
    if not model.compiled or getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"Model {model.name!r} is not compiled, so that its optimizer and its loss are not "
            "known. Call model.compile(optimizer, loss) first."
        )
    sizes = tuple(dict.fromkeys(batch_sizes))
    if not sizes or not all(_is_count(size) and size > 0 for size in sizes):
        raise ValueError(f"batch_sizes must be whole numbers of 1 or more; got {batch_sizes!r}.")
    if not _is_count(epochs) or epochs < 0:
        raise ValueError(f"epochs must be a whole number of 0 or more; got {epochs!r}.")
    probe = Probe(model, x, y)
    largest = max(sizes)
    work: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory_by_batch(probe, sizes),
        "kept_by_type": lambda: kept_by_type(probe, largest),
        "sparsity": lambda: sparsity_over_training(probe, largest, epochs),
        "formats": lambda: formats_side_by_side(probe, largest),
        "trained_parts": lambda: trained_parts(probe, largest),
    }
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    with unchanged(model):
        for name, title in PARTS.items():
            progress(title)
            found[name] = None
            try:
                found[name] = work[name]()
            except Exception as error:  # whatever goes wrong in a part, the others still come
                failures[name] = f"{type(error).__name__}: {error}"
    if len(failures) == len(PARTS):
        raise ValueError(
            f"Model {model.name!r} could not be investigated on these data. "
            f"{next(iter(failures.values()))}"
        )
    samples = len(np.asarray(keras.tree.flatten(x)[0]))
    return Investigation(model.name, samples, False, **found, failures=failures)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
