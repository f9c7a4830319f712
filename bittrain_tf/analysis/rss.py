"""Memory of this process as Linux accounts for it: resident set size (RSS), now and at its peak."""

from __future__ import annotations

import pathlib
import sys

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


def check_supported() -> None:
    """Check that peaks can be measured here.

    Raises:
        RuntimeError: If not, with the reason.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(
            f"Memory is measured through Linux's /proc, and this is {sys.platform}. Measure on "
            "Linux (a container will do); compress and analyze work here all the same."
        )
    try:
        reset_peak()
        peak()
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"Memory cannot be measured: {error}. Peaks need a readable /proc/self/status "
            "and a writable /proc/self/clear_refs, which some sandboxes forbid."
        ) from error


def resident() -> int:
    """Bytes resident now."""
    return _status_bytes("VmRSS")


def peak() -> int:
    """The most bytes resident since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Forget the peak so far."""
    _CLEAR_REFS.write_text("5")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {field}")
