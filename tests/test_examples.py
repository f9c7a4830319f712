"""Every example runs as its reader would run it, and prints what it promises."""

import pathlib
import re

import pytest
from processes import ROOT, python


def run(module, *arguments):
    result = python("-m", module, *arguments)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_every_example_is_tested():
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"digits"}
    tested = set(re.findall(r'run\("examples\.(\w+)"', pathlib.Path(__file__).read_text()))
    assert examples == tested


def test_quickstart():
    out = run("examples.quickstart")
    stock, compressed = (float(value) for value in re.findall(r"([\d.]+) MB", out))
    assert 0 < compressed < stock / 2
    assert float(re.search(r"test accuracy ([\d.]+)", out)[1]) > 0.8


def test_fine_tuning():
    out = run("examples.fine_tuning")
    kept = {
        trained: [float(value) for value in re.findall(r"([\d.]+) MB", line)]
        for trained in ("everything", "head", "biases")
        for line in out.splitlines()
        if re.search(rf"\b{trained} +│", line)
    }
    assert kept["everything"][1] < 0.6 * kept["everything"][0]
    assert kept["head"][0] < 0.1 * kept["everything"][0]
    assert kept["biases"][1] < kept["biases"][0]


def test_custom_training_loop():
    assert "the same losses, bit for bit: True" in run("examples.custom_training_loop")


def test_subclassed_model():
    out = run("examples.subclassed_model")
    losses = [float(value) for value in re.findall(r"mse ([\d.]+)", out)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "restored: True" in out


@pytest.mark.slow
def test_on_device():
    out = run("examples.on_device")
    known, before, after, back = (float(x) for x in re.findall(r"([\d.]+)% of the test", out))
    # LiteRT's rounding may turn a digit, of 360.
    assert abs(before - known) < 0.6
    assert known < 55  # half of the digits have never been seen
    assert after > 70
    assert abs(back - after) < 0.6
    assert re.search(r"took \d+ MB at its peak", out)


@pytest.mark.slow
def test_demo(tmp_path):
    plot = tmp_path / "demo.png"
    out = run("examples.demo", "--quick", "--output", plot)
    assert "test accuracy" in out
    assert "Kept for the backward pass" in out
    assert re.search(r"examples\.demo:build", out.replace("\n", ""))
    assert plot.read_bytes().startswith(b"\x89PNG")
