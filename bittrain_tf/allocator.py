"""The memory allocator of this process, as training uses it.

TensorFlow takes every tensor from the C library's `malloc`. glibc's keeps freed memory for
later requests, in several arenas, and a large request seldom fits the gaps that are left
between what is still in use. So a training process grows past what is alive in it, step by
step. Requests above a threshold go to the operating system instead, and back to it when they
are freed; glibc raises that threshold by itself to 32 MB, which leaves most activations below.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import pathlib
import re
import sys

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Every large tensor is then mapped, and its pages faulted in, anew. With the first of these a
# compressed step still takes no more CPU time than stock's; with the second it takes about a
# tenth more, for less memory (docs/memory.md).
_LARGE, _LARGE_IN_BUDGETS = 16 * 2**20, 8 * 2**20
_TRIM = 64 * 2**20  # what glibc raises it to by itself, given the time
_OTHERS = ("jemalloc", "tcmalloc", "mimalloc")


def name() -> str:
    """`"glibc"`, `"jemalloc"`, `"tcmalloc"`, `"mimalloc"`, or `"unknown"`."""
    if not sys.platform.startswith("linux"):
        return "unknown"
    try:
        mapped = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        mapped = ""
    for other in _OTHERS:
        if re.search(rf"/lib{other}[^/\n]*\.so", mapped):
            return other
    return "unknown" if _glibc() is None else "glibc"


def return_freed() -> None:
    """Free what only garbage refers to, and have the allocator return unused pages."""
    gc.collect()
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def map_large(*, for_budget: bool) -> None:
    """Have glibc take large tensors from the operating system, and return them when freed.

    For the whole process, and for good. Nothing happens where another allocator is in use, or
    where the environment sets the threshold.

    Args:
        for_budget: Whether memory has been given preference over time.
    """
    if name() == "glibc" and not _is_configured():
        libc = _glibc()
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_IN_BUDGETS if for_budget else _LARGE)
        # Setting one of the two fixes the other where it stands, which may be at 128 KB.
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM)


def _is_configured() -> bool:
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
