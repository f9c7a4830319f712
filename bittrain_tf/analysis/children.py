"""A measurement in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

_MEMORY_ENVIRONMENT = {
    # Two allocators keep what TensorFlow frees for themselves, and what was freed once would
    # count as used ever after: glibc's, which raises the size from which it returns memory at
    # once (fixing it stops that), and oneDNN's pool (the system's allocator instead). Both
    # make steps slower, so time is measured without.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}
_STDERR_LINES = 20


def environment() -> dict[str, str]:
    """The environment of a child process: what can be imported here can be imported there."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def failure(what: str, code: int, stderr: str) -> RuntimeError:
    """The error that a child process doing `what` failed."""
    tail = "\n".join(stderr.splitlines()[-_STDERR_LINES:])
    killed = " (killed, likely for want of memory)" if code == -9 else ""
    return RuntimeError(f"The child process {what} failed with exit code {code}{killed}:\n{tail}")


def slowness(what: str, timeout: float) -> TimeoutError:
    """The error that a child process doing `what` took too long."""
    return TimeoutError(
        f"The child process {what} took longer than {timeout:g} s; allow more with timeout=, or "
        "measure something smaller."
    )


def complete(
    module: str, request: dict[str, Any], *, for_memory: bool, timeout: float
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """Run `python -m module REQUEST.json` to its end, whatever that is.

    Args:
        module: Reads the request, and writes its result as JSON to the path in `"result"`.
        request: What it reads.
        for_memory: Whether memory is what counts, not time.
        timeout: Seconds to wait.

    Returns:
        How it ended, and what it wrote; None if it failed, or wrote nothing.

    Raises:
        subprocess.TimeoutExpired: If it takes longer.
    """
    variables = environment()
    for name, value in _MEMORY_ENVIRONMENT.items():
        variables.pop(name, None)
        if for_memory:
            variables[name] = value
    with tempfile.TemporaryDirectory(prefix="bittrain-") as folder:
        request_file = pathlib.Path(folder, "request.json")
        result_file = pathlib.Path(folder, "result.json")
        request_file.write_text(json.dumps({**request, "result": str(result_file)}))
        done = subprocess.run(
            [sys.executable, "-m", module, str(request_file)],
            env=variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        succeeded = not done.returncode and result_file.exists()
        return done, json.loads(result_file.read_text()) if succeeded else None


def run(
    module: str, request: dict[str, Any], *, what: str, for_memory: bool, timeout: float
) -> dict[str, Any]:
    """What comes of `complete`; `what` it does is for messages.

    Raises:
        RuntimeError: If it fails.
        TimeoutError: If it takes longer.
    """
    try:
        done, result = complete(module, request, for_memory=for_memory, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise slowness(what, timeout) from None
    if result is None:
        raise failure(what, done.returncode, done.stderr)
    return result
