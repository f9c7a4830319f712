"""Which layers `report` says are compressed, and the reasons it gives for the others."""

import json

import keras
import pytest
from keras import layers

import bittrain_tf as bt


def model_of_many():
    inner = keras.Sequential([keras.Input((8, 8, 4)), layers.ReLU(name="inner_relu")], name="inner")
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, padding="same", name="conv"),
            layers.BatchNormalization(synchronized=True, name="synchronized"),
            inner,
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(3, name="head"),
        ]
    )


def rows(model):
    return {row.name: row for row in bt.report(model).layers}


def test_before_compress():
    report = rows(model_of_many())
    assert {row.status for row in report.values()} == {"stock"}
    assert report["conv"].reason == "not compressed"
    assert report["conv"].codec is None
    assert report["inner"].reason == "container"


def test_after_compress():
    model = bt.compress(model_of_many())
    report = rows(model)
    for name, class_name in (("conv", "Conv2D"), ("inner_relu", "ReLU"), ("head", "Dense")):
        row = report[name]
        assert (row.class_name, row.status, row.codec, row.reason) == (
            class_name,
            "compressed",
            "bitmap",
            None,
        )
    assert report["inner"].reason == "container"
    assert "replicas" in report["synchronized"].reason
    assert report["mean"].reason == "its gradient needs no activation"
    assert bt.report(model).counts == {"compressed": 3, "stock": len(report) - 3}


def test_left_out_by_filters():
    report = rows(bt.compress(model_of_many(), codec="dense", filters="conv"))
    assert (report["conv"].status, report["conv"].codec) == ("compressed", "dense")
    assert report["head"].reason == "left out by filters"
    assert "replicas" in report["synchronized"].reason


def test_wrappers_and_own_layers():
    class Own(layers.Layer):
        def call(self, x):
            return x * 2

    model = keras.Sequential(
        [
            keras.Input((4, 5)),
            layers.Bidirectional(layers.LSTM(3), name="both"),
            layers.Dense(3),
            Own(name="own"),
        ]
    )
    report = rows(bt.compress(model))
    assert report["both"].reason == "container"
    assert report["forward_lstm"].status == "stock"
    assert report["own"].reason == "no compressed form of this layer is registered"


def test_render_and_to_dict():
    report = bt.report(bt.compress(model_of_many()))
    text = report.render()
    assert "inner_relu" in text
    assert "3 compressed" in text
    read = json.loads(json.dumps(report.to_dict()))
    assert read["counts"] == report.counts
    assert len(read["layers"]) == len(report.layers)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        bt.report(layers.Dense(3))
    with pytest.raises(ValueError, match="not built"):
        bt.report(keras.Sequential([layers.Dense(3)]))
