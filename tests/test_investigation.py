"""`investigate`: its figures against what is known of small models, and the model left alone."""

import json
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_bits, sparse
from keras import layers

import bittrain_tf as bt
from bittrain_tf import cli
from bittrain_tf.analysis.audit import StepAudit
from bittrain_tf.investigation import page
from bittrain_tf.investigation.data import subject
from bittrain_tf.investigation.formats import BITMAP, ENCODERS, break_even, stored_tensor
from bittrain_tf.investigation.result import PARTS, RANDOM_DATA
from bittrain_tf.investigation.sparsity import LayerSparsity, Sparsity

module = sys.modules["bittrain_tf.investigation.investigate"]
SIZE, CHANNELS, CLASSES = 8, 8, 3
ELEMENTS = SIZE * SIZE * CHANNELS  # of an activation of one sample


def data(samples=12):
    rng = np.random.default_rng(0)
    x = rng.random((samples, SIZE, SIZE, 1), dtype=np.float32)
    return x, np.arange(samples) % CLASSES


def network(optimizer="adam", metrics=("accuracy",), **compile_options):
    """A convolution, a normalization, a nested ReLU, dropout, and a head."""
    inner = keras.Sequential(
        [keras.Input((SIZE, SIZE, CHANNELS)), layers.ReLU(name="relu")], name="inner"
    )
    model = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 1)),
            layers.Conv2D(CHANNELS, 3, padding="same", name="conv"),
            layers.BatchNormalization(name="norm"),
            inner,
            layers.Flatten(name="flat"),
            layers.Dropout(0.5, seed=1, name="drop"),
            layers.Dense(CLASSES, activation="softmax", name="head"),
        ],
        name="net>b",
    )
    model.compile(
        optimizer, "sparse_categorical_crossentropy", metrics=list(metrics), **compile_options
    )
    return model


@pytest.fixture(scope="module")
def found():
    keras.utils.set_random_seed(0)
    result = bt.investigate(network(), *data(), batch_sizes=(4, 16), epochs=2)
    assert result.failures == {}
    return result


def everything_of(model):
    """What must be the same afterwards: objects by identity, values by their bits."""
    models = [model, *(x for x in model.layers if isinstance(x, keras.Model))]
    flat = [model, *(inner for m in models for inner in m.layers)]
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    return {
        "classes": [type(x) for x in flat],
        "flags": [x.trainable for x in flat],
        "variable flags": [v.trainable for v in model.variables],
        "weights": [v.numpy() for v in model.variables],
        "metrics": [v.numpy() for v in model.metrics_variables],
        "optimizer": [(o, o.built) for o in optimizers],
        "optimizer variables": [v.numpy() for o in optimizers for v in o.variables],
        "attributes": {name: id(value) for name, value in vars(model).items()},
        "compiled": [model.compiled, model.loss, model.jit_compile, model.train_function],
    }


def assert_unchanged(model, before):
    after = everything_of(model)
    for what in ("weights", "metrics", "optimizer variables"):
        for a, b in zip(after.pop(what), before.pop(what), strict=True):
            assert_same_bits(a, b, what)
    for what in after:
        assert after[what] == before[what], what


def trained_before():
    model = network()
    model.fit(*data(), verbose=0)
    return model


def partly_frozen():
    """Flags that neither layers nor variables tell alone."""
    model = trained_before()
    model.get_layer("inner").trainable = False
    model.get_layer("inner").get_layer("relu").trainable = True
    model.get_layer("conv").kernel.trainable = False
    return model


def metrics_not_yet_built():
    model = network()
    assert not model.optimizer.built
    return model


def already_compressed():
    return bt.compress(trained_before())


def on_its_own_optimizers():
    """A model that trains with an optimizer of another attribute than Keras's."""

    class Twice(keras.Sequential):
        def train_step(self, batch):
            logs = super().train_step(batch)
            self.second.apply([tf.ones_like(v) for v in self.trainable_variables])
            return logs

    model = Twice(network().layers)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.second = keras.optimizers.SGD(0.5, momentum=0.9)
    model.second.build(model.trainable_variables)
    model.fit(*data(), verbose=0)
    return model


@pytest.mark.parametrize(
    "make",
    [partly_frozen, metrics_not_yet_built, already_compressed, on_its_own_optimizers],
)
def test_the_model_comes_back_as_it_was(make):
    model = make()
    before = everything_of(model)
    result = bt.investigate(model, *data(), batch_sizes=(4,), epochs=1)
    assert result.failures == {}
    assert len(result.sparsity.losses) == 1
    if make is metrics_not_yet_built:  # they are then, and count nothing
        before["metrics"] = [np.zeros_like(v.numpy()) for v in model.metrics_variables]
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("where", "error"),
    [("fit", RuntimeError("no luck")), ("frozen", KeyboardInterrupt())],
)
def test_the_model_comes_back_after_an_exception(error, where, monkeypatch):
    model = partly_frozen()
    before = everything_of(model)

    def fail(*arguments):
        raise error

    if where == "fit":  # after an epoch
        monkeypatch.setattr("bittrain_tf.investigation.sparsity.math.isfinite", fail)
    else:  # with only some weights trainable
        monkeypatch.setattr("bittrain_tf.investigation.trained_parts.optimizer_bytes", fail)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            bt.investigate(model, *data(), batch_sizes=(4,), epochs=1)
    else:
        result = bt.investigate(model, *data(), batch_sizes=(4,), epochs=1)
        assert result.failures == {"sparsity": "RuntimeError: no luck"}
        assert result.sparsity is None
        assert "no luck" in result.render()
        assert all(result.part(name) for name in PARTS if name != "sparsity")
    assert_unchanged(model, before)


def test_memory_by_batch_is_that_of_variables_and_analyze(found):
    model = network()
    model.optimizer.build(model.trainable_variables)

    def size(variables):
        return sum(v.numpy().nbytes for v in variables)

    assert [(row.batch_size, row.kind) for row in found.memory.rows] == [
        (4, "stock"),
        (4, "compressed"),
        (16, "stock"),
        (16, "compressed"),
    ]
    for row in found.memory.rows:
        assert row.parameters == size(model.weights)
        assert row.gradients == size(model.trainable_weights)
        assert row.optimizer == size(model.optimizer.variables)
        assert row.total == row.parameters + row.gradients + row.optimizer + row.activations
    x, y = data()
    assert found.memory.rows[0].activations == bt.analyze(model, x[:4], y[:4]).kept_bytes
    # 12 samples are repeated to 16.
    again = np.r_[0:12, 0:4]
    assert found.memory.rows[2].activations == bt.analyze(model, x[again], y[again]).kept_bytes
    stock, compressed = found.memory.rows[2:]
    assert compressed.activations < 0.5 * stock.activations


def test_frozen_weights_have_no_gradients():
    model = network()
    model.get_layer("conv").trainable = False
    row = bt.investigate(model, *data(), batch_sizes=(2,), epochs=0).memory.rows[0]
    frozen = sum(v.numpy().nbytes for v in model.get_layer("conv").weights)
    trained = sum(v.numpy().nbytes for v in model.trainable_weights)
    assert row.gradients == trained
    assert row.parameters >= trained + frozen


def test_kept_by_type_adds_up_and_encodings_count_where_the_activation_comes_from(found):
    rows = {row.layer_type: row for row in found.kept_by_type.rows}
    memory = {row.kind: row for row in found.memory.rows if row.batch_size == 16}
    for kind in ("stock", "compressed"):
        total = sum(getattr(row, kind) for row in rows.values())
        assert total == memory[kind].activations
    activation = 16 * ELEMENTS * 4
    assert rows["Conv2D"].stock == activation  # for the normalization
    assert rows["ReLU"].stock == activation  # in a nested model
    assert rows["ReLU"].compressed == activation // 32
    # The dense layer encodes what it reads, but dropout made it.
    assert activation // 32 < rows["Dropout"].compressed < activation // 2
    assert "Dense" not in rows
    assert [row.stock for row in rows.values()] == sorted(
        (row.stock for row in rows.values()), reverse=True
    )


def test_sparsity_is_that_of_the_model_at_the_time():
    x, y = data(8)
    keras.utils.set_random_seed(0)
    model = network(keras.optimizers.SGD(1.0))
    model.get_layer("norm").beta.assign(tf.fill([CHANNELS], -9.0))
    reference = network(keras.optimizers.SGD(1.0))
    reference.set_weights(model.get_weights())
    result = bt.investigate(model, x, y, batch_sizes=(8,), epochs=3).sparsity
    relu = {layer.layer: layer for layer in result.layers}["inner/relu"]
    assert (relu.layer_type, relu.elements, len(relu.zeros)) == ("ReLU", 8 * ELEMENTS, 4)
    assert relu.zeros[0] == 1.0
    assert len(result.losses) == 3
    # Every epoch is one batch, so that it does not matter in which order.
    audit = StepAudit(reference, x, y)
    for epoch in range(4):
        (row,) = (r for r in audit.rows() if r.layer == "inner/relu" and r.kind == "dense")
        assert relu.zeros[epoch] == pytest.approx(1 - row.density, abs=0.02), epoch
        reference.fit(x, y, batch_size=8, verbose=0)


def test_sparsity_changes_with_training_and_is_weighted(found):
    part = found.sparsity
    by_layer = {layer.layer: layer for layer in part.layers}
    assert list(by_layer) == ["conv", "inner/relu", "drop"]  # as the forward pass goes
    assert by_layer["conv"].zeros == (0.0, 0.0, 0.0)
    assert 0.3 < by_layer["inner/relu"].zeros[0] < 0.7
    assert by_layer["inner/relu"].zeros[0] != by_layer["inner/relu"].zeros[2]
    assert part.by_type["ReLU"] == by_layer["inner/relu"].zeros
    elements = [layer.elements for layer in part.layers]
    expected = np.average([layer.zeros for layer in part.layers], axis=0, weights=elements)
    assert part.overall == pytest.approx(tuple(expected))
    one, three = (LayerSparsity(f"{n}", "Dense", n, (1.0 / n,)) for n in (1, 3))
    assert Sparsity(1, (), (one, three)).by_type == {"Dense": (0.5,)}


def test_no_epochs_is_no_training(monkeypatch):
    monkeypatch.setattr(keras.Model, "fit", None)
    part = bt.investigate(network(), *data(), batch_sizes=(4,), epochs=0).sparsity
    assert part.losses == ()
    assert {len(layer.zeros) for layer in part.layers} == {1}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(512,), (6, 100), (4, 8, 16), (3, 8, 8, 16)])
@pytest.mark.parametrize("name", [n for n in ENCODERS if n != "dense"])
def test_break_even_agrees_with_real_encodings(name, shape, dtype):
    """With as many non-zeros as are just below it a format is smaller, just above it larger."""
    size, element_bytes = int(np.prod(shape)), tf.as_dtype(dtype).size
    limit = break_even(name, shape, element_bytes) * size
    for nonzero, is_smaller in ((np.ceil(limit) - 1, True), (np.floor(limit) + 1, False)):
        flat = np.zeros(size, np.float32)
        flat[np.random.default_rng(0).permutation(size)[: int(nonzero)]] = 1.5
        stored = stored_tensor("layer", tf.cast(flat.reshape(shape), dtype))
        dense = size * element_bytes
        assert stored.nbytes["dense"] == dense
        assert stored.density == nonzero / size
        assert (stored.nbytes[name] < dense) == is_smaller, stored


def test_all_formats_keep_what_is_not_all_zero_bits():
    x = np.zeros((2, 64), np.float32)
    x[0, :3] = -0.0, 1e-45, np.nan
    stored = stored_tensor("layer", tf.constant(x))
    assert stored.density == 3 / 128
    assert stored.nbytes == {
        "dense": 512,
        "COO, int64": 3 * (4 + 2 * 8),
        "COO, int32": 3 * (4 + 2 * 4),
        "CSR": 3 * (4 + 4) + 3 * 4,
        "bitmap": 3 * 4 + 16,
    }


def test_formats_are_of_the_tensors_kept(found):
    part = found.formats
    assert part.batch_size == 8  # of 16: no more are encoded
    x, y = data()
    keras.utils.set_random_seed(0)
    analysis = bt.analyze(network(), x[:8], y[:8])
    dense = [r for r in analysis.rows if r.kind == "dense" and r.dtype == "float32"]
    assert sorted(t.shape for t in part.tensors) == sorted(r.shape for r in dense)
    by_layer = {t.layer: t for t in part.tensors}
    for row in dense:
        if row.layer != "drop":
            assert by_layer[row.layer].density == row.density
    totals = {total.format: total for total in part.totals}
    assert totals["dense"].nbytes == sum(row.bytes for row in dense)
    assert totals[BITMAP].or_dense <= totals[BITMAP].nbytes
    assert 0 < totals[BITMAP].smaller < len(part.tensors)
    conv = by_layer["conv"]  # without zeros, so that it is left dense
    assert totals["COO, int64"].or_dense >= conv.nbytes["dense"]
    assert totals["COO, int64"].nbytes >= conv.nbytes["COO, int64"] > 8 * conv.nbytes["dense"]


def test_trained_parts(found):
    model = network()
    rows = {row.trained: row for row in found.trained_parts.rows}
    assert found.trained_parts.head == "head"
    head = model.get_layer("head")
    features = ELEMENTS
    assert rows["everything"].gradients == found.memory.rows[0].gradients
    assert rows["everything"].stock == found.memory.rows[2].activations
    assert rows["head only"].gradients == 4 * (features + 1) * CLASSES
    assert rows["biases only"].gradients == 4 * (CHANNELS + CHANNELS + CLASSES)  # beta among them
    for row in rows.values():
        assert row.optimizer == pytest.approx(2 * row.gradients, abs=16)  # Adam
        assert row.parameters == sum(v.numpy().nbytes for v in model.weights)
    x, y = data()
    again = np.r_[0:12, 0:4]
    for variable in model.trainable_variables:
        variable.trainable = any(variable is v for v in head.variables)
    assert rows["head only"].stock == bt.analyze(model, x[again], y[again]).kept_bytes
    assert rows["head only"].stock < rows["biases only"].stock < rows["everything"].stock


def test_a_head_in_a_model_in_a_model_and_no_biases():
    inner = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, use_bias=False),
            layers.Dense(2, use_bias=False, name="last"),
        ]
    )
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, use_bias=False), inner])
    model.compile("sgd", "mse")
    inner.layers[0].trainable = False
    x = sparse((16, 64))
    part = bt.investigate(
        model, x, np.zeros((16, 2), np.float32), batch_sizes=(16,), epochs=0
    ).trained_parts
    assert part.head == "last"
    assert [row.trained for row in part.rows] == ["everything", "head only"]
    assert [row.gradients for row in part.rows] == [4 * (64 * 64 * 2 + 128), 4 * 128]
    assert not inner.layers[0].trainable


def test_bad_arguments():
    x, y = data()
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        bt.investigate("VGG16", x, y)
    with pytest.raises(ValueError, match="not compiled"):
        bt.investigate(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), x, y)
    for sizes in ((), (0,), (1.5,), (True,)):
        with pytest.raises(ValueError, match="batch_sizes must be whole numbers"):
            bt.investigate(network(), x, y, batch_sizes=sizes)
    with pytest.raises(ValueError, match="epochs must be a whole number"):
        bt.investigate(network(), x, y, epochs=-1)
    with pytest.raises(ValueError, match=r"could not be investigated.*expects shape"):
        bt.investigate(network(), x[:, :4], y, batch_sizes=(4,), epochs=1)


def test_to_dict_and_render(found):
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["samples"] == 12
    assert set(PARTS) < set(read)
    assert read["memory"]["rows"][0]["activations"] == found.memory.rows[0].activations
    assert len(read["sparsity"]["by_type"]["ReLU"]) == 3
    text = found.render()
    for expected in ("biases only", "COO, int64", "Conv2D", "inner/relu", "epoch 2"):
        assert expected in text


def test_the_page_needs_no_other_file(found, tmp_path):
    found.save(tmp_path / "page")
    text = (tmp_path / "page" / "index.html").read_text()
    pictures = sorted(path.name for path in (tmp_path / "page").glob("*.png"))
    assert pictures == sorted(figure.file for figure in page.FIGURES)
    assert len(re.findall(r'src="data:image/png;base64,iVBOR', text)) == len(pictures)
    outside = re.sub(r"base64,[A-Za-z0-9+/=]*", "", text)
    assert not re.search(r"https?:|url\(|<script|<link|@import|href", outside)
    assert "net>b" not in outside
    assert "net&gt;b" in outside
    for expected in (*PARTS.values(), "inner/relu", "biases only"):
        assert expected in outside
    assert "random" not in outside


def test_files_are_not_replaced_unasked(found, tmp_path):
    (tmp_path / "formats.png").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"formats\.png exists already.*overwrite=True"):
        found.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["formats.png", "notes.txt"]
    found.save(tmp_path, overwrite=True)
    assert (tmp_path / "formats.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileExistsError, match="is a file"):
        found.save(tmp_path / "notes.txt")


def test_matplotlib_is_asked_for_before_the_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setattr(module, "memory_by_batch", None)
    command = ["investigate", "measured_models:small", "--output", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert "pip install bittrain-tf[plots]" in " ".join(capsys.readouterr().err.split())


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.random((6, 16, 16, 3), dtype=np.float32)
    file = save_npz(tmp_path / "data.npz", x=x, y=np.arange(6) % 3)
    command = ["investigate", "measured_models:small", "--batch-sizes", "2,4", "--epochs", "1"]
    assert cli.main([*command, "--data", file]) == 0
    out, err = capsys.readouterr()
    for text in ("Memory of a training step", "bitmap", "conv_1", "head only"):
        assert text in out
    assert "Sparsity over training" in err
    made = tmp_path / "investigation-measured_models-small" / "index.html"
    assert "6 samples" in made.read_text()

    monkeypatch.setattr(bt, "investigate", None)  # not called before the files are checked
    assert cli.main(command) == 2
    assert "exists already" in " ".join(capsys.readouterr().err.split())


def test_command_json_and_a_part_that_fails(capsys, tmp_path, monkeypatch):
    def fail(probe, size):
        raise ValueError("<i>not today</i>")

    monkeypatch.setattr(module, "formats_side_by_side", fail)
    command = ["investigate", "measured_models:small", "--json", "--epochs", "0"]
    assert cli.main([*command, "--batch-sizes", "2", "--output", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    read = json.loads(out)
    assert read["samples"] == 5  # those of the function, neither cut nor repeated
    assert read["formats"] is None
    assert "not today" in read["failures"]["formats"]
    assert "FAILED formats" in err
    text = (tmp_path / "out" / "index.html").read_text()
    assert "Not available. ValueError: &lt;i&gt;not today" in text
    assert not (tmp_path / "out" / "formats.png").exists()


def test_keras_applications_are_built_for_the_data(tmp_path):
    x = np.zeros((4, 32, 40, 3), np.uint8)
    options = {"batch_size": 4, "image_size": 32, "seed": 0}
    file = save_npz(tmp_path / "labels.npz", x=x, y=np.array([0, 6, 1, 2]))
    given = subject("MobileNet", file, **options)
    assert given.model.input_shape == (None, 32, 40, 3)
    assert given.model.output_shape == (None, 7)
    assert not given.is_random
    file = save_npz(tmp_path / "rows.npz", x=x, y=np.eye(4, dtype=np.float32))
    given = subject("MobileNet", file, **options)
    assert given.model.output_shape == (None, 4)
    assert given.model.loss == "categorical_crossentropy"
    given.model.train_on_batch(given.x, given.y)
    given = subject("MobileNet", None, **options)
    assert given.is_random
    assert given.x.shape == (16, 32, 32, 3)


def test_random_images_are_said_to_be_no_measure(capsys, tmp_path, monkeypatch, found):
    monkeypatch.setattr(bt, "investigate", lambda *a, **k: found)
    command = ["investigate", "MobileNet", "--image-size", "32", "--batch-sizes", "1"]
    assert cli.main([*command, "--output", str(tmp_path)]) == 0
    assert "not representative" in " ".join(capsys.readouterr().out.split())
    assert RANDOM_DATA in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((3, 16, 16, 3))}, "has no array y; it holds ['x']. Save it with"),
        ({"a": np.ones(3)}, "has no array x and no y"),
        ({"x": np.ones((3, 16, 16, 3)), "y": np.ones(2)}, "shapes (3, 16, 16, 3) and (2,)"),
        ({"x": np.ones((3, 9, 16, 3)), "y": np.ones(3)}, "expects shape (None, 16, 16, 3)"),
        ({"x": np.ones((3, 16, 16, 3)), "y": np.array([0, 1, 3])}, "from 0 to 2; got values"),
        ({"x": np.array(["a"]), "y": np.ones(1)}, "x in"),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, "got shape (0, 2)"),
    ],
)
def test_data_that_cannot_be_used(arrays, message, capsys, tmp_path):
    file = save_npz(tmp_path / "data.npz", **arrays)
    command = ["investigate", "measured_models:small", "--output", str(tmp_path / "out")]
    assert cli.main([*command, "--data", file]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((3, 8)), "y": np.ones(3)}, "MobileNet takes images"),
        ({"x": np.ones((3, 32, 32, 3)), "y": np.full(3, 0.5)}, "tell classes apart"),
        ({"x": np.ones((3, 8, 8, 3)), "y": np.ones(3)}, "of shape (3, 8, 8, 3): "),
    ],
)
def test_data_that_is_not_for_keras_applications(arrays, message, capsys, tmp_path):
    file = save_npz(tmp_path / "data.npz", **arrays)
    command = ["investigate", "MobileNet", "--output", str(tmp_path / "out"), "--data", file]
    assert cli.main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_files_that_are_none(capsys, tmp_path):
    command = ["investigate", "measured_models:small", "--output", str(tmp_path / "out"), "--data"]
    np.save(tmp_path / "x.npy", np.ones(3))
    (tmp_path / "text.npz").write_text("x")
    np.savez(tmp_path / "objects.npz", x=np.array([{}]), y=np.ones(1))
    for name, message in [
        ("nowhere.npz", "There is no file"),
        ("x.npy", "is no .npz file of arrays x and y"),
        ("text.npz", "is no .npz file of arrays x and y"),
        ("objects.npz", "is no .npz file of arrays x and y"),
    ]:
        assert cli.main([*command, str(tmp_path / name)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("value", [["--batch-sizes", "4,0"], ["--epochs", "-1"]])
def test_usage_errors(value, capsys):
    with pytest.raises(SystemExit):
        cli.main(["investigate", "measured_models:small", *value])
    assert "whole number" in capsys.readouterr().err
