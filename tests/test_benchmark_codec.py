"""The codec's benchmark runs, measures all it promises and overwrites nothing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.codec", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
def test_quick(tmp_path, native):
    figures, plot = tmp_path / "codec.json", tmp_path / "codec.png"
    arguments = ("--quick", "--json", figures, "--output", plot)
    result = run(*arguments, BITTRAIN_NATIVE=native)
    assert result.returncode == 0, result.stderr[-3000:]
    if native == "0":
        assert "NOT AVAILABLE" in result.stdout
    assert "8 Mi elements (32 MiB), density 0.5" in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

    sweeps = json.loads(figures.read_text())["sweeps"]
    assert set(sweeps) == {"density", "size", "dtype", "threads"}
    for sweep in sweeps.values():
        assert sweep
        for point in sweep:
            assert {"memcpy", "TensorFlow copy"} < set(point["gb_per_s"])
            assert all(value > 0 for value in point["gb_per_s"].values())

    before = figures.read_text()
    refused = run(*arguments)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert figures.read_text() == before
