"""What `analyze` reads from a traced step, against what is known of small models."""

import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_bits
from keras import layers

import bittrain_tf as bt
from bittrain_tf import recipes

BATCH, SIZE, CHANNELS = 4, 16, 8
ACTIVATION_BYTES = BATCH * SIZE * SIZE * CHANNELS * 4
# With the first convolution stock, nothing cheaper than the codec can keep the ReLU's output.
ENCODED = "relu|second"


def images(size=SIZE, batch=BATCH):
    return np.random.default_rng(0).random((batch, size, size, 3), dtype=np.float32)


def conv_net(*extra):
    """Two convolutions with ReLUs, and `extra` layers between them."""
    return keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            layers.Conv2D(CHANNELS, 3, padding="same", name="first"),
            layers.ReLU(name="relu"),
            *extra,
            layers.Conv2D(CHANNELS, 3, padding="same", activation="relu", name="second"),
            layers.GlobalAveragePooling2D(name="mean"),
            layers.Dense(3, name="head"),
        ]
    )


def all_variables(model):
    optimizer = model.optimizer.variables if model.optimizer else []
    return [*model.variables, *model.metrics_variables, *optimizer]


def kept(analysis, kind):
    return {row.layer: row for row in analysis.rows if row.kind == kind}


def test_stock_convolutions_keep_what_is_computed_by_hand():
    analysis = bt.analyze(conv_net(), images())
    dense = kept(analysis, "dense")
    assert set(dense) == {"relu", "second"}
    assert dense["relu"].shape == (BATCH, SIZE, SIZE, CHANNELS)
    assert dense["relu"].dtype == "float32"
    assert analysis.totals["dense"] == 2 * ACTIVATION_BYTES
    assert {str(holder) for holder in dense["relu"].holders} == {
        "relu: ReluGrad",
        "second: Conv2DBackpropFilter",
    }
    assert {str(holder) for holder in dense["second"].holders} == {"second: ReluGrad"}
    assert 0.1 < dense["relu"].density < 0.9


def test_the_batch_is_listed_but_not_counted():
    x = images()
    analysis = bt.analyze(conv_net(), x)
    (row,) = kept(analysis, "input").values()
    assert row.bytes == x.nbytes
    assert "input" not in analysis.totals
    assert analysis.kept_bytes == sum(analysis.totals.values())
    assert analysis.kept_bytes == sum(r.bytes for r in analysis.rows) - x.nbytes


def test_compressed_convolutions_keep_masks_and_bitmaps():
    model, x = conv_net(), images()
    stock = bt.analyze(model, x)
    compressed = bt.analyze(bt.compress(model, filters=ENCODED), x)
    assert "dense" not in compressed.totals
    assert compressed.sparse_dense(threshold_bytes=0) == ()
    elements = ACTIVATION_BYTES // 4
    # The mask of a ReLU is also the bitmap of its output, and counts once.
    assert {r.layer: r.bytes for r in compressed.rows if r.kind == "mask"} == {
        "relu": elements // 8,
        "second": elements // 8,
    }
    nonzero = round(kept(stock, "dense")["relu"].density * elements)
    assert compressed.totals["bitmap"] == nonzero * 4
    assert compressed.kept_bytes < 0.4 * stock.kept_bytes
    assert bt.analyze(bt.restore(model), x).totals == stock.totals


def test_codec_dense_is_seen_as_dense():
    model, x = conv_net(), images()
    analysis = bt.analyze(bt.compress(model, codec="dense", filters=ENCODED), x)
    assert analysis.totals["dense"] == ACTIVATION_BYTES


def test_a_holder_that_does_not_let_go_is_found_and_named():
    model = conv_net(layers.Lambda(lambda t: t * t, name="square"))
    analysis = bt.analyze(bt.compress(model), images())
    found = {row.layer: row for row in analysis.sparse_dense(threshold_bytes=1)}
    assert "square" in {holder.layer for holder in found["relu"].holders}


def test_a_rebuild_not_tied_to_the_gradient_is_found(monkeypatch):
    monkeypatch.setattr(recipes, "after", lambda tensors, first: list(tensors))
    analysis = bt.analyze(bt.compress(conv_net(), filters=ENCODED), images())
    assert any("decode_bitmap" in row.tensor for row in analysis.sparse_dense(threshold_bytes=1))


def test_sparse_dense_thresholds():
    analysis = bt.analyze(conv_net(), images())
    assert analysis.sparse_dense() == ()  # both are smaller than 64 KB
    both = analysis.sparse_dense(threshold_bytes=ACTIVATION_BYTES)
    assert {row.layer for row in both} == {"relu", "second"}
    (relu,) = (row for row in both if row.layer == "relu")
    assert relu.break_even == 1 - 1 / 32
    saving = relu.break_even - relu.density
    assert relu in analysis.sparse_dense(0, min_saving=saving)
    assert relu not in analysis.sparse_dense(0, min_saving=saving + 1e-6)


def test_density_is_of_bit_patterns():
    values = np.zeros((2, 1024), np.float32)
    values[0, :512] = -0.0
    values[1, :256] = 1e-40
    constant = tf.constant(values)
    model = keras.Sequential(
        [keras.Input((1024,)), layers.Lambda(lambda t: t + constant), layers.Dense(2)]
    )
    row = kept(bt.analyze(model, np.full((2, 1024), -0.0, np.float32)), "dense")["lambda"]
    # -0.0 + -0.0 is -0.0; -0.0 + 0.0 is 0.0; a subnormal stays or is flushed by the addition.
    assert row.density in (512 / 2048, 768 / 2048)


def test_views_count_once():
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            layers.Conv2D(CHANNELS, 3, padding="same", activation="relu", name="conv"),
            layers.Flatten(),
            layers.Reshape((SIZE * SIZE, CHANNELS)),
            layers.Dense(3, name="head"),
        ]
    )
    analysis = bt.analyze(model, images())
    assert [row.layer for row in analysis.rows if row.bytes >= ACTIVATION_BYTES] == ["conv"]
    holders = {str(holder) for holder in kept(analysis, "dense")["conv"].holders}
    assert holders == {"conv: ReluGrad", "head: MatMul"}


def test_layers_named_like_codecs_are_no_codecs():
    model = keras.Sequential(
        [
            keras.Input((600,)),
            layers.Dense(600, activation="relu", name="encode_data"),
            layers.Dense(600, activation="relu", name="decode_1"),
            layers.Dense(3),
        ]
    )
    dense = kept(bt.analyze(model, np.ones((2, 600), np.float32)), "dense")
    assert set(dense) == {"encode_data", "decode_1"}
    assert {str(h) for h in dense["encode_data"].holders} == {
        "encode_data: ReluGrad",
        "decode_1: MatMul",
    }


def test_dropout_mask_is_counted_though_it_does_not_depend_on_the_data():
    model = keras.Sequential(
        [keras.Input((2048,)), layers.Dense(2048), layers.Dropout(0.5, name="drop")]
    )
    x = np.ones((BATCH, 2048), np.float32)
    row = kept(bt.analyze(model, x), "dense")["drop"]
    assert (row.dtype, row.bytes) == ("bool", BATCH * 2048)
    bt.compress(model)
    row = kept(bt.analyze(model, x), "mask")["drop"]
    assert (row.dtype, row.bytes) == ("uint8", BATCH * 2048 // 8)


def test_frozen_layers_keep_nothing():
    model = conv_net()
    for name in ("first", "second"):
        model.get_layer(name).trainable = False
    analysis = bt.analyze(model, images())
    assert set(analysis.totals) <= {"small"}
    model.trainable = False
    assert bt.analyze(model, images()).rows == ()


@pytest.mark.parametrize("compressed", [False, True])
def test_the_model_is_left_as_it_was(compressed):
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3)),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.5),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = images(), np.arange(BATCH) % 3
    model.fit(x, y, verbose=0)
    if compressed:
        bt.compress(model)
    variables = all_variables(model)
    assert any("seed" in v.path for v in variables)
    before = [v.numpy() for v in variables]
    instance = [vars(layer).keys() for layer in [model, *model.layers]]
    bt.analyze(model, x, y)
    for variable, value in zip(variables, before, strict=True):
        assert_same_bits(variable.numpy(), value, variable.path)
    assert [v.path for v in all_variables(model)] == [v.path for v in variables]
    assert [vars(layer).keys() for layer in [model, *model.layers]] == instance
    assert all("call" not in vars(layer) for layer in [model, *model.layers])


def test_the_loss_it_differentiates():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(512, name="head")])
    x, y = np.ones((2, 4), np.float32), np.zeros((2, 512), np.float32)
    seen = []

    def loss(targets, outputs):
        seen.append((targets.shape, outputs.shape))
        return tf.reduce_sum(tf.abs(outputs - targets))

    bt.analyze(model, x, y, loss=loss)
    assert seen == [((2, 512), (2, 512))]
    assert kept(bt.analyze(model, x), "dense").keys() == {"head"}  # mean of squares
    model.compile("sgd", "mse")
    assert "(loss)" in {row.layer for row in bt.analyze(model, x, y).rows}


def test_several_outputs_and_losses_never_trained():
    inputs = keras.Input((8,), name="in")
    outputs = {"a": layers.Dense(2, name="a")(inputs), "b": layers.Dense(3, name="b")(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    x = np.ones((2, 8), np.float32)
    y = {"a": np.ones((2, 2), np.float32), "b": np.ones((2, 3), np.float32)}
    assert bt.analyze(model, x, y).kept_bytes > 0
    model.fit(x, y, verbose=0)


def test_layers_of_nested_shared_and_subclassed_models_are_named():
    class Tail(keras.Model):
        def __init__(self):
            super().__init__(name="tail")
            self.dense = layers.Dense(600, activation="relu", name="dense")
            self.dense_1 = layers.Dense(600, activation="relu", name="dense_1")

        def call(self, x):
            return self.dense_1(self.dense(x))

    tail = Tail()
    alone = Tail()
    alone(np.ones((2, 600), np.float32))
    assert set(kept(bt.analyze(alone, np.ones((2, 600))), "dense")) == {"dense", "dense_1"}
    inputs = [keras.Input((600,)), keras.Input((600,))]
    model = keras.Model(inputs, layers.Add()([tail(x) for x in inputs]))
    x = [np.ones((2, 600), np.float32)] * 2
    analysis = bt.analyze(model, x)
    made_by = [row.layer for row in analysis.rows if row.kind == "dense"]
    assert sorted(made_by) == [
        "add",
        "tail/dense",
        "tail/dense",
        "tail/dense_1",
        "tail/dense_1",
    ]
    first = next(row for row in analysis.rows if row.layer == "tail/dense")
    assert {str(h) for h in first.holders} == {"tail/dense: ReluGrad", "tail/dense_1: MatMul"}
    bt.compress(model)
    assert {h.layer for row in bt.analyze(model, x).rows for h in row.holders} >= {
        "tail/dense",
        "tail/dense_1",
    }


def test_loops_are_measured_step_by_step():
    model = keras.Sequential([keras.Input((7, 5)), layers.LSTM(16, name="lstm"), layers.Dense(2)])
    analysis = bt.analyze(model, np.random.default_rng(0).normal(size=(3, 7, 5)))
    states = [row for row in analysis.rows if row.shape == (7, 3, 16)]
    assert len(states) >= 4
    assert all(row.layer == "lstm" and row.bytes == 7 * 3 * 16 * 4 for row in states)


def test_inputs_given_by_name():
    inputs = {name: keras.Input((8,), name=name) for name in ("b", "a")}
    model = keras.Model(
        inputs, layers.Dense(3)(layers.Concatenate(name="concatenate")(list(inputs.values())))
    )
    analysis = bt.analyze(model, {"a": np.ones((2, 8)), "b": np.ones((2, 8))})
    assert [row.shape for row in analysis.rows if row.layer == "concatenate"] == [(2, 16)]


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = conv_net()
    finally:
        keras.config.set_dtype_policy("float32")
    row = kept(bt.analyze(model, images()), "dense")["relu"]
    assert (row.dtype, row.bytes) == ("bfloat16", ACTIVATION_BYTES // 2)
    assert row.break_even == 1 - 1 / 16


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (images(8), None, r"expects shape \(None, 16, 16, 3\).*got \(4, 8, 8, 3\)"),
        (images()[0], None, r"expects shape .* got \(16, 16, 3\).*batch"),
        ([images(), images()], None, "1 inputs expected, got 2"),
        (images(), np.zeros(3), r"different numbers of samples: \[3, 4\]"),
    ],
)
def test_a_batch_that_does_not_fit(x, y, message):
    with pytest.raises(ValueError, match=message):
        bt.analyze(conv_net(), x, y)


def test_other_bad_arguments():
    with pytest.raises(TypeError, match=r"Expected a keras\.Model, got builtins\.str"):
        bt.analyze("VGG16", images())
    with pytest.raises(ValueError, match="not built"):
        bt.analyze(keras.Sequential([layers.Dense(2)]), images())
    with pytest.raises(TypeError, match="one batch"):
        bt.analyze(conv_net(), tf.data.Dataset.from_tensors(images()))


def test_render_and_to_dict():
    analysis = bt.analyze(conv_net(), images())
    text = analysis.render()
    assert "Conv2DBackpropFilter" in text
    assert "32.8 KB" in text
    read = json.loads(json.dumps(analysis.to_dict()))
    assert read["totals"] == analysis.totals
    assert read["rows"][0]["bytes"] == ACTIVATION_BYTES
    sizes = [row["bytes"] for row in read["rows"]]
    assert sizes == sorted(sizes, reverse=True)


def test_plot(tmp_path, monkeypatch):
    analysis = bt.analyze(conv_net(), images())
    path = tmp_path / "kept.png"
    analysis.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        analysis.plot(path)
    analysis.plot(path, overwrite=True)
    with pytest.raises(ValueError, match="format"):
        analysis.plot(tmp_path / "kept.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ImportError, match=re.escape("pip install bittrain-tf[plots]")):
        analysis.plot(tmp_path / "other.png")


def test_importing_the_package_is_light():
    # Keras imports some of these itself where they are installed.
    code = (
        "import sys, keras; before = set(sys.modules); import bittrain_tf; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new & {'rich', 'matplotlib', 'sklearn'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["VGG16", "ResNet50", "MobileNetV2", "DenseNet121"])
def test_nothing_sparse_stays_dense_in_real_models(name):
    model = getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)
    x = images(64, batch=8)
    stock = bt.analyze(model, x)
    compressed = bt.analyze(bt.compress(model), x)
    assert stock.sparse_dense()
    assert [(row.layer, row.density) for row in compressed.sparse_dense()] == []
    assert compressed.kept_bytes < 0.65 * stock.kept_bytes
