"""The `bittrain` command: what it prints, and its exit status."""

import json
import subprocess
import sys

import pytest
from test_measure import figures, measurement

import bittrain_tf as bt
from bittrain_tf import cli
from bittrain_tf.analysis import doctor
from bittrain_tf.native import load


def test_analyze_before_and_after(capsys, tmp_path):
    plot = tmp_path / "kept.png"
    assert cli.main(["analyze", "measured_models:small", "--plot", str(plot)]) == 0
    out, err = capsys.readouterr()
    for text in ("stock", "compressed", "total", "mask", "conv_1"):
        assert text in out
    assert "Tracing" in err
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["analyze", "measured_models:small", "--plot", str(plot)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_analyze_json_and_options(capsys):
    command = ["analyze", "measured_models:small", "--json", "--batch-size", "3"]
    assert cli.main([*command, "--filters", "conv_1", "--codec", "dense"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["compressed"]["kept_bytes"] <= read["stock"]["kept_bytes"]
    assert {tuple(row["shape"][:1]) for row in read["stock"]["rows"]} == {(3,)}
    assert read["sparse_dense"] == []


def test_plan_is_printed_and_drawn(capsys, tmp_path):
    plot = tmp_path / "curve.png"
    command = ["plan", "measured_models:wide", "--batch-size", "2048"]
    assert cli.main([*command, "--time-budget", "1.5", "--plot", str(plot)]) == 0
    out, _ = capsys.readouterr()
    for text in ("hidden_3", "rebuild", "this plan", "stock"):
        assert text in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*command, "--memory-budget", "0.9", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["peak"] <= 0.9 * read["stock_peak"]
    assert read["rematscope"] is None or read["rematscope"]["peak"] > 0


def test_plan_that_cannot_be(capsys):
    assert cli.main(["plan", "measured_models:wide", "--memory-budget", "1000"]) == 2
    assert "lowest that can be reached" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["plan", "measured_models:wide", "--memory-budget", "half"])
    assert "'half' is not a number" in capsys.readouterr().err


def test_analyze_fails_on_a_sparse_tensor_kept_dense(capsys):
    assert cli.main(["analyze", "measured_models:sparse_dense"]) == 1
    out, err = capsys.readouterr()
    assert "Kept dense though sparse" in out
    assert "square" in out
    assert "FAILED" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "ResNet5"], "Close: ResNet50"),
        (["analyze", "nowhere:function"], "no module 'nowhere'"),
        (["analyze", "measured_models:smal"], "has no function 'smal'. Close: small"),
        (["analyze", "measured_models:not_compiled"], "must return (compiled keras.Model, x, y)"),
        (["analyze", "measured_models:small", "--codec", "zip"], "Unknown codec"),
        (["analyze", "measured_models:small", "--filters", "zip"], "matches no layer"),
        (["bench", "measured_models:small", "--plot", "x.txt"], "format"),
        (["bench", "VGG16", "VGG61"], "VGG61"),
    ],
)
def test_errors_are_one_readable_message(arguments, message, capsys):
    assert cli.main(arguments) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["bench"], ["bench", "VGG16", "--rounds", "0"]]
)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: bittrain" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    """`measure` without child processes: peak ratio 0.5, CPU ratio 1.1; the calls made."""
    calls = []

    def measure(name, *, progress, **options):
        progress(name)
        calls.append((name, options))
        return measurement(figures(), figures(resident=110, peak=210))

    monkeypatch.setattr(bt, "measure", measure)
    return calls


def test_bench_several_models(measured, capsys, tmp_path):
    plot = tmp_path / "peaks.png"
    command = ["bench", "VGG16", "ResNet50", "--batch-size", "4", "--plot", str(plot)]
    assert cli.main(command) == 0
    assert [name for name, _ in measured] == ["VGG16", "ResNet50"]
    assert measured[0][1]["batch_size"] == 4
    out, err = capsys.readouterr()
    for text in ("0.50", "1.10", "1.20", "0.70", "equal"):
        assert text in out
    assert "ResNet50" in err
    assert plot.exists()
    assert cli.main(["bench", "VGG16", "--json"]) == 0
    (read,) = json.loads(capsys.readouterr().out)
    assert read["peak_ratio"] == 0.5


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        (["--max-peak-ratio", "0.5", "--max-cpu-ratio", "1.1"], 0),
        (["--max-peak-ratio", "0.4"], 1),
        (["--max-cpu-ratio", "1.0"], 1),
    ],
)
def test_bench_limits(measured, capsys, limits, status):
    assert cli.main(["bench", "VGG16", *limits]) == status
    assert ("over the limit" in capsys.readouterr().err) == bool(status)


def test_bench_shows_why_a_child_failed(capsys):
    assert cli.main(["bench", "measured_models:breaks"]) == 2
    assert "this model cannot be built" in capsys.readouterr().err


def test_doctor(capsys, monkeypatch):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for text in ("TensorFlow", "Keras backend", "bitmap by", "peak RSS"):
        assert text in out

    monkeypatch.setattr(load, "_native", load.Native(None, "no such luck"))
    assert cli.main(["doctor"]) == 0
    assert "no native kernels: no such luck" in capsys.readouterr().out

    def broken():
        raise AttributeError("gone")

    monkeypatch.setattr(doctor.private, "recording", broken)
    assert cli.main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    assert {c["name"]: c["ok"] for c in json.loads(out)}["Private symbols"] is False
    assert "AttributeError: gone" in err


def test_python_m():
    command = [sys.executable, "-m", "bittrain_tf", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.strip() == bt.__version__
