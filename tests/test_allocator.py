"""What is asked of the C library's allocator, and when it is left alone."""

from __future__ import annotations

import sys

import pytest
from processes import python

from bittrain_tf import allocator

pytestmark = pytest.mark.skipif(allocator.name() != "glibc", reason="for glibc's malloc")

# Every other block is freed: none of it at the end of the heap, so it is not returned by itself.
GAPS = """
import numpy as np
from bittrain_tf import allocator
from bittrain_tf.analysis import rss
{before}
blocks = [np.ones({size}, np.uint8) for _ in range({count})]
full = rss.resident()
del blocks[::2]
{after}
print(full - rss.resident())
"""


def freed(before="", after="", *, size, count, **environment):
    code = GAPS.format(before=before, after=after, size=size, count=count)
    done = python("-c", code, **environment)
    assert not done.returncode, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_freed_memory_is_returned():
    sizes = {"size": 100_000, "count": 1000}  # bytes
    assert freed(**sizes) < 10e6
    assert freed(after="allocator.return_freed()", **sizes) > 40e6


@pytest.mark.parametrize(("for_budget", "megabytes"), [(False, 18), (True, 10)])
def test_large_tensors_come_from_the_system_and_go_back_to_it(for_budget, megabytes):
    sizes = {"size": megabytes << 20, "count": 10}
    # glibc raises its threshold when such a block is freed, to no less than its size.
    raised = "block = np.ones(24 << 20, np.uint8); del block"
    assert freed(raised, **sizes) < 20e6
    call = f"allocator.map_large(for_budget={for_budget})"
    assert freed(f"{raised}; {call}", **sizes) > 4 * (megabytes << 20)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432"),
    ],
)
def test_what_the_user_has_set_stands(variable, value):
    found = freed(
        "allocator.map_large(for_budget=True)", size=12 << 20, count=10, **{variable: value}
    )
    assert found < 20e6


def test_elsewhere(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    allocator._glibc.cache_clear()
    try:
        assert allocator.name() == "unknown"
        allocator.map_large(for_budget=True)
        allocator.return_freed()
    finally:
        monkeypatch.undo()
        allocator._glibc.cache_clear()
