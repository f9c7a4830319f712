"""What a training step takes on this machine, measured in LiteRT in processes of its own."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics

from bittrain_tf.analysis import children, rss


@dataclasses.dataclass(frozen=True)
class Measured:
    """What training a file takes.

    Attributes:
        peak: The most bytes resident during training steps, above what was resident before there
            was an interpreter: its own structures, the file's weights, activations, all.
        cpu: CPU seconds a step, user and system; the median of some.
        wall: Seconds a step that pass; the median of some.
    """

    peak: int
    cpu: float
    wall: float


def measure(
    path: str | os.PathLike[str], *, delegate: bool = True, steps: int = 10, timeout: float = 600
) -> Measured:
    """Train a file that `export` wrote for a few steps on random numbers.

    Args:
        path: The file.
        delegate: Whether the interpreter may use its default delegate (XNNPACK).
        steps: How many steps to time.
        timeout: Seconds to wait for each of the two processes.

    Raises:
        RuntimeError: If memory cannot be measured here, or a process fails.
        TimeoutError: If one takes longer.
    """
    rss.check_supported()
    path = pathlib.Path(path).resolve()
    request = {"path": str(path), "delegate": delegate, "steps": steps, "rss": rss.__file__}

    def run(task: str) -> dict[str, object]:
        return children.run(
            "tflite_tools.child",
            {**request, "task": task},
            what=f"measuring {task} of {path.name}",
            for_memory=task == "memory",
            timeout=timeout,
        )

    memory, timed = run("memory"), run("timing")["steps"]
    return Measured(
        memory["peak"] - memory["before"],
        *(statistics.median(step[clock] for step in timed) for clock in ("cpu", "wall")),
    )
