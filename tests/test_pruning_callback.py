"""`ActivationPruning`: targets reached, files, resuming, restoring, reports, devices, errors."""

from __future__ import annotations

import io

import keras
import numpy as np
import pytest
import rich.console
import tensorflow as tf
from harness import assert_same_bits
from keras import layers
from processes import python
from sklearn.datasets import load_digits

import bittrain_tf as bt
import tflite_tools as tt
from bittrain_tf.private import flatten_layers


def _digits(count: int = 640) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return digits.images[:count, ..., None].astype("float32") / 16, digits.target[:count]


def _plain() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="first"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="second"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32, activation="relu", name="third"),
            layers.Dense(10),
        ]
    )


def _residual() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        x = layers.Add()([x, layers.Conv2D(16, 3, padding="same")(y)])
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _transformer() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(16)(layers.Reshape((8, 8))(inputs))
    y = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(y, y)])
    y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(16)(y)])
    x = layers.Dense(16, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


# Rectifiers and batch normalizations, but not the layers between them.
PRUNED = "first|second|third|re_lu|batch_norm|activation|dense"


def _compiled(make=_plain, **options) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"], **options)
    return bt.compress(model)


def _fit(model, *callbacks, epochs=4, **options):
    x, y = _digits()
    options = {"batch_size": 32, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=list(callbacks), **options)


def _pruning(target=0.7, **options) -> bt.ActivationPruning:
    return bt.ActivationPruning(target, **{"verbose": 0, **options})


def _sparsities(model, x) -> dict[str, float]:
    """Of the outputs of all pruned layers, in inference."""
    names = [row.name for row in _reported(model).layers]
    outputs = keras.Model(model.inputs, [model.get_layer(name).output for name in names])
    found = outputs.predict(x, verbose=0, batch_size=len(x))
    found = found if isinstance(found, list) else [found]
    return {name: float(np.mean(y == 0)) for name, y in zip(names, found, strict=True)}


def _reported(model):
    callback = _pruning()
    keras.callbacks.Callback.set_model(callback, model)
    return callback.report()


# Reaching the target


@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (_plain, "forward"),
        (_residual, "forward"),
        pytest.param(_transformer, "forward", marks=pytest.mark.slow),
        pytest.param(_plain, "saved", marks=pytest.mark.slow),
        pytest.param(_residual, "saved", marks=pytest.mark.slow),
        (_transformer, "saved"),
    ],
)
def test_the_target_is_reached_within_two_points(make, mode):
    model = _compiled(make)
    pruning = _pruning(0.7, mode=mode, scope=PRUNED)
    history = _fit(model, pruning, epochs=8).history
    rows = pruning.report().layers
    assert rows
    for row in rows:
        assert row.steps == 160
        assert row.sparsity >= 0.68, row
        if mode == "saved" or np.all(np.asarray(row.thresholds) > 0):
            assert row.sparsity <= 0.72, row
    assert history["loss"][-1] < history["loss"][0]
    if mode == "forward":
        x, _ = _digits()
        assert min(_sparsities(model, x).values()) >= 0.68


def test_the_ramp_is_half_of_the_training_by_default():
    model = _compiled()
    _fit(model, _pruning(), epochs=4)
    assert {layer.activation_pruning.ramp for layer in _pruned_layers(model)} == {40}
    _fit(model, _pruning(), epochs=2)
    assert {layer.activation_pruning.ramp for layer in _pruned_layers(model)} == {20}
    saved = _compiled()
    _fit(saved, _pruning(mode="saved"), epochs=1)
    assert {layer.activation_pruning.ramp for layer in _pruned_layers(saved)} == {0}


def _pruned_layers(model):
    return [layer for layer in flatten_layers(model) if hasattr(layer, "activation_pruning")]


@pytest.mark.parametrize("mode", ["forward", "saved"])
def test_training_on_in_the_same_way_takes_no_new_trace(mode):
    model, pruning = _compiled(), _pruning(mode=mode)
    _fit(model, pruning, epochs=1)
    traced = model.train_function
    _fit(model, pruning, epochs=1)
    assert model.train_function is traced
    _fit(model, _pruning(0.5, mode=mode), epochs=1)  # of another target the graph is another
    assert model.train_function is not traced
    assert {row.target_sparsity for row in _reported(model).layers} == {0.5}


def test_nothing_is_pruned_before_it_begins():
    stock, model = _compiled(), _compiled()
    _fit(stock, epochs=1)
    _fit(model, _pruning(0.9, begin=1000, ramp=0), epochs=1)
    for a, b in zip(stock.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert max(row.thresholds[1] for row in _reported(model).layers) == 0


@pytest.mark.parametrize(
    ("scope", "names"),
    [
        (None, {"first", "second", "third"}),
        ("first|third", {"first", "third"}),
        (["second"], {"second"}),
        (lambda layer: layer.name == "third", {"third"}),
    ],
    ids=["all", "regex", "names", "function"],
)
def test_scope(scope, names):
    model = _compiled()
    pruning = _pruning(scope=scope)
    pruning.set_model(model)
    assert {row.name for row in pruning.report().layers} == names


def test_every_channel_by_itself():
    model = _compiled()
    pruning = _pruning(0.7, per="channel", scope="second")
    _fit(model, pruning, epochs=6)
    assert model.get_layer("second").activation_pruning.thresholds.shape == (16,)
    x, _ = _digits()
    inner = keras.Model(model.inputs, model.get_layer("second").output)
    of_channels = np.mean(inner.predict(x, verbose=0) == 0, axis=(0, 1, 2))
    assert of_channels.min() > 0.6


def test_layers_shared_and_nested():
    keras.utils.set_random_seed(0)
    shared = layers.Dense(16, activation="relu", name="shared")
    block = keras.Sequential([keras.Input((16,)), shared, layers.Dense(16)], name="block")
    inputs = keras.Input((16,))
    model = keras.Model(inputs, layers.Add()([block(inputs), shared(block(inputs))]))
    model.compile("sgd", "mse")
    bt.compress(model)
    pruning = _pruning(ramp=0)
    x = np.random.default_rng(0).standard_normal((64, 16), "float32")
    model.fit(x, x, batch_size=16, epochs=2, verbose=0, callbacks=[pruning])
    (row,) = pruning.report().layers
    assert row.name == "shared"
    assert row.steps == 3 * 8  # a step each time it is called


def test_a_loop_of_ones_own():
    model = _compiled()
    pruning = _pruning(0.8, ramp=10)
    pruning.set_model(model)
    x, y = _digits(64)
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
            )
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)

    for _ in range(60):
        step()
    assert min(_sparsities(model, x).values()) > 0.78
    before = [row.steps for row in pruning.report().layers]
    model(x, training=False)
    assert [row.steps for row in pruning.report().layers] == before == [60] * 3


@pytest.mark.slow
def test_on_two_replicas():
    script = """
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
import numpy as np
import bittrain_tf as bt
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    hidden = keras.layers.Dense(32, activation="relu")
    model = keras.Sequential([keras.Input((16,)), hidden, keras.layers.Dense(4)])
    model.compile("sgd", "mse")
bt.compress(model)
x = np.random.default_rng(0).standard_normal((64, 16), "float32")
pruning = bt.ActivationPruning(0.8, ramp=0, verbose=0)
model.fit(x, x[:, :4], batch_size=16, epochs=4, verbose=0, callbacks=[pruning])
(row,) = pruning.report().layers
print(row.steps, row.sparsity)
"""
    steps, sparsity = python("-c", script).stdout.split()[-2:]
    assert int(steps) == 16
    assert float(sparsity) == pytest.approx(0.8, abs=0.05)


# Files


def test_files_hold_the_thresholds(tmp_path):
    x, _ = _digits()
    model = _compiled(_residual)
    _fit(model, _pruning(0.8, scope=PRUNED))
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same_bits(loaded.predict(x, verbose=0), expected)
    assert _reported(loaded).to_dict()["layers"] == _reported(model).to_dict()["layers"]
    # Not the function of the weights alone.
    assert np.abs(bt.restore(loaded).predict(x, verbose=0) - expected).max() > 1e-2


def test_reading_a_file_takes_the_package(tmp_path):
    model = _compiled()
    _fit(model, _pruning(), epochs=1)
    model.save(tmp_path / "model.keras")
    script = f"import keras; keras.models.load_model({str(tmp_path / 'model.keras')!r})"
    assert python("-c", script).returncode != 0  # rather than read a model of other outputs
    assert python("-c", f"import bittrain_tf; {script}").returncode == 0


def test_a_loaded_model_trains_on(tmp_path):
    model = _compiled()
    _fit(model, _pruning(0.7))
    model.save(tmp_path / "model.keras")
    loaded = bt.compress(keras.models.load_model(tmp_path / "model.keras"))
    both = []
    for each in (model, loaded):
        pruning = _pruning(0.7, ramp=40)
        _fit(each, pruning, epochs=1, shuffle=False)
        both.append(pruning.report().to_dict()["layers"])
    assert both[0] == both[1]
    assert both[0][0]["steps"] == 100
    for a, b in zip(model.trainable_variables, loaded.trainable_variables, strict=True):
        assert_same_bits(a.numpy(), b.numpy())


@pytest.mark.parametrize("mode", ["forward", pytest.param("saved", marks=pytest.mark.slow)])
def test_backup_and_restore_keeps_the_state(tmp_path, mode):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    whole = _compiled()
    _fit(whole, _pruning(mode=mode, ramp=40), epochs=4, shuffle=False)
    for epochs in (2, 4):
        resumed = _compiled()
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        callbacks = [backup, _pruning(mode=mode, ramp=40)]
        try:
            more = [Interrupt()] if epochs == 2 else []
            _fit(resumed, *callbacks, *more, epochs=4, shuffle=False)
        except KeyboardInterrupt:
            continue
    both = [
        [(r.sparsity, r.thresholds, r.steps) for r in _reported(m).layers] for m in (whole, resumed)
    ]
    assert both[0] == both[1]
    for a, b in zip(whole.trainable_variables, resumed.trainable_variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_weights_files_of_stock_and_pruned_models(tmp_path):
    model, stock = _compiled(), bt.restore(_compiled())
    _fit(model, _pruning(0.8), epochs=2)
    model.save_weights(tmp_path / "pruned.weights.h5")
    stock.load_weights(tmp_path / "pruned.weights.h5")
    for a, b in zip(stock.weights, model.weights, strict=False):
        if a.path.split("/")[-1] == b.path.split("/")[-1]:
            assert_same_bits(a.numpy(), b.numpy())
    before = _reported(model).to_dict()
    stock.save_weights(tmp_path / "stock.weights.h5")
    model.load_weights(tmp_path / "stock.weights.h5")  # has no thresholds: they stay
    assert _reported(model).to_dict() == before
    other = _compiled()
    _pruning(mode="saved").set_model(other)
    with pytest.raises(ValueError, match="another mode"):
        other.load_weights(tmp_path / "pruned.weights.h5")
    other = _compiled()
    by_channel = _pruning(per="channel")
    _fit(other, by_channel, epochs=1)
    with pytest.raises(ValueError, match="per='channel'"):
        other.load_weights(tmp_path / "pruned.weights.h5")


def test_early_stopping_restores_thresholds_with_weights():
    model = _compiled()
    kept = {}

    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["measure"] = float(epoch)
            if epoch == 0:
                kept["row"] = _reported(model).layers[0]

    stop = keras.callbacks.EarlyStopping(
        "measure", mode="min", patience=2, restore_best_weights=True
    )
    _fit(model, _pruning(), Worse(), stop, epochs=4)
    assert _reported(model).layers[0] == kept["row"]


def test_exports(tmp_path):
    x, _ = _digits(16)
    model = _compiled(_residual)
    _fit(model, _pruning(0.7, scope=PRUNED))
    expected = model.predict(x, verbose=0)
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(loaded.serve(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [_plain, pytest.param(_residual, marks=pytest.mark.slow)])
def test_in_litert_as_in_keras(tmp_path, make):
    x, _ = _digits(8)
    model = _compiled(make)
    _fit(model, _pruning(0.7, scope=PRUNED))
    path = tmp_path / "model.tflite"
    optimizer = keras.optimizers.SGD(0.05)
    tt.export(model, path, loss=model.loss, optimizer=optimizer, batch_size=8)
    np.testing.assert_allclose(
        tt.Trainer(path).infer(x), model.predict(x, verbose=0), rtol=1e-4, atol=1e-4
    )
    steps = [row.steps for row in _reported(model).layers]
    model.compile(optimizer, model.loss)
    verified = tt.verify(path, model, steps=3, measured=False)
    assert verified.ok, verified.render()
    assert not any("pruning" in d.what for d in verified.worst)
    assert [row.steps for row in _reported(model).layers] == steps
    # The verification would notice: the same file is not that of the model without pruning.
    assert not tt.verify(path, bt.restore(model), steps=1, measured=False).ok


# Undoing


@pytest.mark.parametrize("mode", ["forward", "saved"])
def test_restore_removes_all_of_it(mode):
    x, _ = _digits()
    model, fresh = _compiled(_residual), bt.restore(_compiled(_residual))
    classes = [type(layer) for layer in fresh.layers]
    names = [v.path.split("/")[-1] for v in fresh.weights]
    _fit(model, _pruning(0.8, mode=mode, scope=PRUNED))
    assert len(model.weights) > len(names)
    bt.restore(model)
    assert [type(layer) for layer in model.layers] == classes
    assert [v.path.split("/")[-1] for v in model.weights] == names
    assert not _pruned_layers(model)
    assert "Pruned" not in model.to_json()
    fresh.set_weights(model.get_weights())
    assert_same_bits(model.predict(x, verbose=0), fresh.predict(x, verbose=0))
    _fit(bt.compress(model), epochs=1)  # and trains on


def test_compressing_anew_goes_on_pruning():
    x, _ = _digits()
    model = _compiled()
    _fit(model, _pruning(0.8))
    expected, report = model.predict(x, verbose=0), _reported(model)
    bt.compress(model, codec="dense")
    assert _reported(model) == report
    assert_same_bits(model.predict(x, verbose=0), expected)
    with bt.compressed(model, filters="first"):
        pass
    assert _reported(model) == report
    assert_same_bits(model.predict(x, verbose=0), expected)


def test_changing_the_mode_starts_anew():
    model = _compiled()
    _fit(model, _pruning(0.8), epochs=1)
    pruning = _pruning(0.5, mode="saved")
    _fit(model, pruning, epochs=1)
    assert {row.mode for row in pruning.report().layers} == {"saved"}
    assert {row.steps for row in pruning.report().layers} == {20}


def test_clones_are_pruned_too():
    model = _compiled()
    _fit(model, _pruning(0.8))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    x, _ = _digits()
    assert_same_bits(clone.predict(x, verbose=0), model.predict(x, verbose=0))


# Reports


def test_logs_and_tensorboard(tmp_path):
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    model = _compiled()
    board = keras.callbacks.TensorBoard(tmp_path / "logs")
    history = _fit(model, _pruning(0.8), board, epochs=3).history
    assert len(history["sparsity/first"]) == 3
    mean = np.mean([history[f"sparsity/{name}"] for name in ("first", "second", "third")], axis=0)
    np.testing.assert_allclose(history["sparsity"], mean, rtol=1e-6)
    events = event_accumulator.EventAccumulator(str(tmp_path / "logs" / "train"), {"tensors": 0})
    events.Reload()
    assert "epoch_sparsity/first" in events.Tags()["tensors"]
    values = [tf.make_ndarray(e.tensor_proto) for e in events.Tensors("epoch_sparsity/first")]
    np.testing.assert_allclose(values, history["sparsity/first"], rtol=1e-6)


def test_a_target_of_zero_reports_and_prunes_nothing():
    x, _ = _digits()
    model = _compiled()
    _fit(model, epochs=2)
    expected, weights = model.predict(x, verbose=0), model.get_weights()
    watching = _pruning(0.0)
    _fit(model, watching, epochs=1)
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        variable.assign(value)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-5)
    found = _sparsities(model, x)
    for row in watching.report().layers:
        assert row.thresholds == (0.0, 0.0)
        assert row.sparsity == pytest.approx(found[row.name], abs=0.1)


def test_the_table_at_the_end(capsys):
    model = _compiled()
    pruning = bt.ActivationPruning(0.7)
    _fit(model, pruning, epochs=1)
    printed = capsys.readouterr().out
    assert "Pruned activations" in printed
    assert "second" in printed
    buffer = io.StringIO()
    rich.console.Console(file=buffer, width=100).print(pruning.report())
    assert "70.0%" in buffer.getvalue()
    assert pruning.report().to_dict()["layers"][0]["name"] == "first"


def test_report_of_layers_counts_no_part_of_pruning():
    model = _compiled()
    before = bt.report(model)
    _pruning().set_model(model)
    assert bt.report(model) == before


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_sparsity": 1.0}, "target_sparsity"),
        ({"target_sparsity": -0.1}, "target_sparsity"),
        ({"target_sparsity": "0.7"}, "target_sparsity"),
        ({"begin": -1}, "begin"),
        ({"ramp": 1.5}, "ramp"),
        ({"mode": "backward"}, "forward.*saved"),
        ({"per": "row"}, "layer.*channel.*sample"),
        ({"per": "sample"}, "saved"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        bt.ActivationPruning(**options)


def test_a_model_that_is_not_compressed():
    with pytest.raises(ValueError, match="compress"):
        _fit(bt.restore(_compiled()), _pruning())


def test_a_scope_without_anything_to_prune():
    with pytest.raises(ValueError, match="matches no layer"):
        _fit(_compiled(), _pruning(scope="nothing"))
    with pytest.raises(ValueError, match="scope"):
        _fit(_compiled(_linear), _pruning())


def _linear() -> keras.Model:
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(10)])


def test_data_of_unknown_length():
    x, y = _digits(64)
    data = tf.data.Dataset.from_generator(
        lambda: iter([(x, y)]),
        output_signature=(tf.TensorSpec(x.shape), tf.TensorSpec(y.shape, tf.int64)),
    )
    with pytest.raises(ValueError, match="ramp="):
        _compiled().fit(data, verbose=0, callbacks=[_pruning()])
    _compiled().fit(data, verbose=0, callbacks=[_pruning(ramp=3)])
