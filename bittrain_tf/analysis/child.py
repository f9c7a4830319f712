"""What `measure` runs in a worker: trains a model, round by round, and takes its figures."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterator
from typing import Any

import keras

import bittrain_tf
from bittrain_tf.analysis import rss
from bittrain_tf.analysis.builder import build
from bittrain_tf.analysis.worker import serve

_STEPS = 2  # training steps a round


def rounds(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The figures of one round of training after the other.

    Args:
        request: What to train, see `measure`; `"compress"` has the arguments of
            `bittrain_tf.compress`, or is None for the stock model.

    Yields:
        First, before anything is trained, `{"resident": RSS with the stock model, in bytes}`.
        Then, of each round: `"peak"`, the most bytes resident since, compression and tracing
        included; `"cpu"` and `"wall"`, seconds a step; and `"loss"`, the mean.
    """
    model, x, y = build(
        request["model"],
        batch_size=request["batch_size"],
        image_size=request["image_size"],
        seed=request["seed"],
        batches=_STEPS,
    )
    gc.collect()
    resident = rss.resident()
    rss.reset_peak()
    callbacks = []
    if request["compress"] is not None:
        _compress(request, model, x, y)
        callbacks = _callbacks(request)
    yield {"resident": resident}
    while True:
        cpu, wall = _cpu_seconds(), time.perf_counter()
        loss = _train(model, x, y, request["batch_size"], callbacks)
        yield {
            "cpu": (_cpu_seconds() - cpu) / _STEPS,
            "wall": (time.perf_counter() - wall) / _STEPS,
            "peak": rss.peak(),
            "loss": loss,
        }


def _compress(request: dict[str, Any], model: keras.Model, x: Any, y: Any) -> None:
    options = request["compress"]
    has_budget = any(options.get(f"{kind}_budget") is not None for kind in ("memory", "time"))
    size = request["batch_size"]
    batch = keras.tree.map_structure(lambda array: array[:size], (x, y))
    bittrain_tf.compress(model, sample=batch if has_budget else None, **options)


def _callbacks(request: dict[str, Any]) -> list[keras.callbacks.Callback]:
    if request["pruning"] is None:
        return []
    # At the target from the first step: the figures are of a step.
    return [bittrain_tf.ActivationPruning(**request["pruning"], ramp=0, verbose=0)]


def _train(
    model: keras.Model,
    x: Any,
    y: Any,
    batch_size: int,
    callbacks: list[keras.callbacks.Callback],
) -> float:
    """One round of training; returns the mean loss."""
    history = model.fit(
        x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0, callbacks=callbacks
    )
    return float(history.history["loss"][0])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve(rounds)
