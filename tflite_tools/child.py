"""What `measure` runs in a child process: `python -m tflite_tools.child REQUEST.json`."""

from __future__ import annotations

import gc
import json
import pathlib
import runpy
import sys
import time
from typing import Any

import numpy as np

from tflite_tools.trainer import Trainer


def memory(request: dict[str, Any]) -> dict[str, Any]:
    """Peak RSS during training steps, and RSS before there was an interpreter, in bytes."""
    # By its path: importing the package would bring TensorFlow, whose free memory would be used.
    rss = runpy.run_path(request["rss"])
    gc.collect()
    before = rss["resident"]()
    rss["reset_peak"]()
    trainer, batch = _prepare(request)
    for _ in range(request["steps"]):
        trainer.train_step(*batch)
    return {"before": before, "peak": rss["peak"]()}


def timing(request: dict[str, Any]) -> dict[str, Any]:
    """CPU and wall seconds of each step."""
    trainer, batch = _prepare(request)
    trainer.train_step(*batch)
    steps = []
    for _ in range(request["steps"]):
        cpu, wall = time.process_time(), time.perf_counter()
        trainer.train_step(*batch)
        steps.append({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall})
    return {"steps": steps}


def _prepare(request: dict[str, Any]) -> tuple[Trainer, list[np.ndarray]]:
    trainer = Trainer(request["path"], delegate=request["delegate"])
    rng = np.random.default_rng(0)
    *data, _ = trainer.manifest["signatures"]["train"]["inputs"]
    batch = []
    for spec in data:
        whole = spec["dtype"].startswith("int")
        # Of class numbers, 0 is always one.
        values = np.zeros(spec["shape"]) if whole else rng.random(spec["shape"])
        batch.append(values.astype(spec["dtype"]))
    return trainer, batch


def main() -> None:
    """Serve one request."""
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    result = {"memory": memory, "timing": timing}[request["task"]](request)
    pathlib.Path(request["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
