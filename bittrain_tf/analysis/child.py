"""What `measure` runs in a child process: `python -m bittrain_tf.analysis.child REQUEST.json`.

Reads a request (see `measure`), trains, and writes the figures to the path the
request names.
"""

from __future__ import annotations

import gc
import json
import pathlib
import resource
import sys
import time
from typing import Any

import keras

import bittrain_tf
from bittrain_tf.analysis import rss
from bittrain_tf.analysis.builder import build

_STEPS = 2  # training steps a round


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Peak RSS during training steps, and RSS just before them, in bytes."""
    model, x, y = _build(request)
    callbacks = []
    if request["compress"] is not None:
        _compress(request, model, x, y)
        callbacks = _callbacks(request)
    size = request["batch_size"]
    losses = [_train(model, x, y, size, callbacks)]  # traces, and makes optimizer slots
    gc.collect()
    resident = rss.resident()
    rss.reset_peak()
    for _ in range(request["rounds"]):
        losses.append(_train(model, x, y, size, callbacks))
    return {"resident": resident, "peak": rss.peak(), "final_loss": losses[-1]}


def timing(request: dict[str, Any]) -> dict[str, Any]:
    """CPU and wall seconds a step of the stock and the compressed model, in turn."""
    models = {kind: _build(request) for kind in ("stock", "compressed")}
    _compress(request, *models["compressed"])
    callbacks = {"stock": [], "compressed": _callbacks(request)}
    for kind, (model, x, y) in models.items():
        _train(model, x, y, request["batch_size"], callbacks[kind])
    rounds = []
    for _ in range(request["rounds"]):
        figures = {}
        for kind, (model, x, y) in models.items():
            cpu, wall = _cpu_seconds(), time.perf_counter()
            _train(model, x, y, request["batch_size"], callbacks[kind])
            figures[kind] = {
                "cpu": (_cpu_seconds() - cpu) / _STEPS,
                "wall": (time.perf_counter() - wall) / _STEPS,
            }
        rounds.append(figures)
    return {"rounds": rounds}


def _build(request: dict[str, Any]) -> tuple[keras.Model, Any, Any]:
    return build(
        request["model"],
        batch_size=request["batch_size"],
        image_size=request["image_size"],
        seed=request["seed"],
        batches=_STEPS,
    )


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


def main() -> None:
    """Serve one request."""
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    result = {"memory": memory, "timing": timing}[request["task"]](request)
    pathlib.Path(request["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
