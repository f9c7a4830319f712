"""What `measure` runs in a child process: `python -m bittrain_tf.analysis.child REQUEST.json`.

Reads a request (see `measure`), trains, and writes the figures to the path the
request names.
"""

from __future__ import annotations

import gc
import importlib
import json
import pathlib
import resource
import sys
import time
from typing import Any

import keras
import numpy as np

import bittrain_tf


def build(request: dict[str, Any]) -> tuple[keras.Model, Any, Any]:
    """The compiled model and two batches of data that a request asks for."""
    keras.utils.set_random_seed(request["seed"])
    name, batch_size = request["model"], request["batch_size"]
    if ":" in name:
        module, function = name.split(":")
        model, x, y = getattr(importlib.import_module(module), function)()
    else:
        size = request["image_size"]
        model = getattr(keras.applications, name)(
            weights=None, input_shape=(size, size, 3), classes=10
        )
        model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
        rng = np.random.default_rng(request["seed"])
        x = rng.random((2 * batch_size, size, size, 3), dtype=np.float32)
        y = rng.integers(0, 10, 2 * batch_size)
    take = 2 * batch_size
    return model, *(
        keras.tree.map_structure(lambda a: _rows(np.asarray(a), take), d) for d in (x, y)
    )


def _rows(array: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, repeating the array as often as needed."""
    return np.resize(array, (count, *array.shape[1:]))


def train(model: keras.Model, x: Any, y: Any, batch_size: int) -> float:
    """Two training steps; returns the mean loss."""
    history = model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
    return float(history.history["loss"][0])


def status_kib(field: str) -> int:
    """A memory figure of this process, in KiB (Linux)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Peak RSS during training steps, and RSS just before them."""
    model, x, y = build(request)
    if request["compress"] is not None:
        bittrain_tf.compress(model, **request["compress"])
    losses = [train(model, x, y, request["batch_size"])]  # traces, and makes optimizer slots
    gc.collect()
    before = status_kib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for _ in range(request["rounds"]):
        losses.append(train(model, x, y, request["batch_size"]))
    return {"before": before * 1024, "peak": status_kib("VmHWM") * 1024, "losses": losses}


def timing(request: dict[str, Any]) -> dict[str, Any]:
    """CPU and wall seconds a step of the stock and the compressed model, in turn."""
    models = {}
    for kind in ("stock", "compressed"):
        models[kind] = build(request)
        if kind == "compressed":
            bittrain_tf.compress(models[kind][0], **request["compress"])
        train(*models[kind], request["batch_size"])
    rounds = []
    for _ in range(request["rounds"]):
        figures = {}
        for kind, (model, x, y) in models.items():
            cpu, wall = _cpu_seconds(), time.perf_counter()
            train(model, x, y, request["batch_size"])
            figures[kind] = {
                "cpu": (_cpu_seconds() - cpu) / 2,
                "wall": (time.perf_counter() - wall) / 2,
            }
        rounds.append(figures)
    return {"rounds": rounds}


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
