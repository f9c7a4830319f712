"""`measure`: real child processes for the figures, and what it refuses."""

import json
import math
import sys

import pytest

import bittrain_tf as bt
from bittrain_tf.analysis import Figures, Measurement, measure
from bittrain_tf.analysis.measure import stages as measure_stages


def figures(**changes):
    plain = {"resident": 100, "peak": 300, "cpu": 1.0, "wall": 1.0, "final_loss": 0.5}
    return Figures(**{**plain, **changes})


def measurement(stock, compressed):
    return Measurement("m", 1, 1, 1, "bitmap", stock, compressed, cpu_ratio=1.1, wall_ratio=1.2)


def test_figures_of_a_small_model():
    stages = []
    found = measure(
        "measured_models:small", batch_size=4, rounds=1, filters=["conv"], progress=stages.append
    )
    assert len(stages) == measure_stages(1)
    for kind in (found.stock, found.compressed):
        assert kind.peak >= kind.resident > 50e6  # TensorFlow alone takes more
        assert kind.above_resident == kind.peak - kind.resident
        assert 0 < kind.wall < 60
        assert 0 < kind.cpu < 60
        assert math.isfinite(kind.final_loss)
    assert found.losses_equal
    assert found.cpu_ratio == pytest.approx(found.compressed.cpu / found.stock.cpu)
    read = json.loads(json.dumps(found.to_dict()))
    assert read["stock"]["above_resident"] == found.stock.above_resident
    assert "measured_models:small" in found.render()


@pytest.mark.slow
def test_compression_lowers_the_measured_peak():
    found = measure("measured_models:wide", batch_size=16384, rounds=2)
    kept = 6 * 16384 * 1024 * 4  # bytes of the ReLUs' outputs
    assert found.stock.above_resident > kept
    assert found.stock.above_resident - found.compressed.above_resident > 0.1 * kept
    assert found.losses_equal


def test_ratios():
    found = measurement(figures(), figures(resident=110, peak=210))
    assert found.peak_ratio == 0.5
    assert found.rss_ratio == 0.7
    assert found.losses_equal
    other = measurement(figures(peak=100), figures(final_loss=0.25))
    assert math.isnan(other.peak_ratio)
    assert other.to_dict()["peak_ratio"] is None
    assert not other.losses_equal
    assert "0.5 / 0.25" in other.render()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet5", "no model of keras.applications. Close: ResNet50"),
        ("ResNet", "package.module:function"),
        ("resnet50", "ResNet50"),
        ("package.module:", "does not name a function"),
        ("a b:function", "does not name a function"),
        (None, "named by a text"),
    ],
)
def test_names_that_name_nothing(model, message):
    with pytest.raises(ValueError, match=message):
        bt.measure(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": "zip"}, ValueError, "Unknown codec"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"rounds": 1.5}, ValueError, "rounds"),
        ({"filters": lambda layer: True}, TypeError, "child process"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        bt.measure("VGG16", **options)


def test_a_child_that_fails_shows_why():
    with pytest.raises(RuntimeError, match="measuring measured_models:breaks failed") as caught:
        bt.measure("measured_models:breaks")
    assert "this model cannot be built" in str(caught.value)


def test_a_child_that_takes_too_long():
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"):
        bt.measure("measured_models:small", timeout=0.05)


def test_elsewhere_than_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="this is darwin"):
        bt.measure("VGG16")
