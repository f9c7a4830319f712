"""What users of neighbouring tools reported, as tests; the public issue is in each docstring."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as small
import tensorflow as tf
from keras import layers

import bittrain_tf as bt
from bittrain_tf.layers import CompressedLayer
from bittrain_tf.private import flatten_layers


def gradients(model, x, y, loss="mse"):
    """Of the loss with respect to the trainable variables, in a graph."""
    loss = keras.losses.get(loss)

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(loss(y, model(x, training=True)))
        return tape.gradient(value, model.trainable_variables)

    return run()


def normals(*shape):
    return np.random.default_rng(5).standard_normal(shape).astype("float32")


# Recomputation


@pytest.mark.parametrize("axis", [-1, 1])
def test_no_gradient_is_none(axis):
    """tensorflow#36981, #57205: the scale of a normalization got no gradient in graph mode."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(axis=axis),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    x, y = normals(4, 6, 6, 3), normals(4, 2)
    stock = gradients(model, x, y)
    compressed = gradients(bt.compress(model), x, y)
    for variable, mine, theirs in zip(model.trainable_variables, compressed, stock, strict=True):
        assert mine is not None, variable.path
        assert mine.shape == variable.shape
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=variable.path)


def test_layers_called_with_keyword_arguments():
    """keras#21207: recomputed layers could not be called with keyword arguments in a graph."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.convolution = layers.Conv2D(4, 3, activation="relu")
            self.normalization = layers.BatchNormalization()
            self.dropout = layers.Dropout(0.5, seed=1)
            self.dense = layers.Dense(2)

        def call(self, x, training=False):
            x = self.normalization(inputs=self.convolution(inputs=x), training=training)
            x = self.dropout(inputs=x, training=training)
            return self.dense(inputs=keras.ops.mean(x, (1, 2)))

    def losses(compress):
        keras.utils.set_random_seed(0)
        model = Model()
        model(normals(4, 6, 6, 3))
        model.compile("sgd", "mse")
        if compress:
            bt.compress(model)
        return small.train(model, normals(4, 6, 6, 3), normals(4, 2))

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-5)


def test_a_mask_reaches_the_layers_behind():
    """keras#21207: `mask=`; what a compressed layer makes of it is what the stock one does."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(7, 4, mask_zero=True),
                layers.Dropout(0.2, seed=1),
                layers.Dense(6, activation="relu"),
                layers.BatchNormalization(),
                layers.GlobalAveragePooling1D(),
                layers.Dense(2),
            ]
        )
        x = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]], "int32")
        return small.Task(model, x, normals(2, 2), "mse")

    stock, task = (small.seeded(build).compile() for _ in range(2))
    bt.compress(task.model)
    np.testing.assert_array_equal(task.model(task.x), stock.model(task.x))
    losses = [small.train(t.model, t.x, t.y) for t in (stock, task)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


# Rewriting


def test_tied_kernel():
    """keras#20172: one kernel used by two layers stayed one; its gradients are summed."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = layers.Dense(6, activation="relu")
            self.decoder = layers.Dense(6, activation="relu")

        def call(self, x):
            y = self.encoder(x)
            self.decoder(y)  # builds it
            return tf.matmul(self.decoder(y), self.encoder.kernel, transpose_b=True)

    model = Tied()
    x = normals(3, 6)
    model(x)
    count = model.count_params()
    stock = gradients(model, x, x)
    bt.compress(model)
    assert model.count_params() == count
    assert small.bits(gradients(model, x, x)) == small.bits(stock)


def test_frozen_bidirectional():
    """keras#17466: a frozen Bidirectional was trainable again after cloning."""
    wrapper = layers.Bidirectional(layers.LSTM(3))
    model = keras.Sequential([keras.Input((4, 2)), wrapper, layers.Dense(4, "relu")])
    wrapper.trainable = False
    model.compile("sgd", "mse")
    before = small.bits(wrapper.get_weights())
    trainable = [v.path for v in model.trainable_weights]
    bt.compress(model)
    assert [v.path for v in model.trainable_weights] == trainable
    small.train(model, normals(3, 4, 2), np.ones((3, 4), np.float32), 2)
    assert small.bits(wrapper.get_weights()) == before


def test_where_and_bitcast_are_not_compiled_by_xla():
    """tensorflow#44904, openxla#45967: XLA refuses bitcasts of data-dependent lengths."""
    model = bt.compress(small.convolutions().model)
    assert not any(
        layer.supports_jit for layer in flatten_layers(model) if isinstance(layer, CompressedLayer)
    )
    model.compile("sgd", "mse", jit_compile="auto")
    assert model.jit_compile is False


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_upsampling_after_relu(policy):
    """keras#20931: bilinear UpSampling2D hands a float32 gradient to a float16 ReLU."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential(
            [
                keras.Input((4, 4, 3)),
                layers.Conv2D(3, 3, padding="same"),
                layers.ReLU(),
                layers.UpSampling2D(interpolation="bilinear"),
                layers.Conv2D(2, 3),
            ]
        )
    finally:
        keras.config.set_dtype_policy(before)
    x, y = normals(2, 4, 4, 3), normals(2, 6, 6, 2)
    stock = gradients(model, x, y)
    assert small.bits(gradients(bt.compress(model), x, y)) == small.bits(stock)


def test_bias_of_a_transposed_convolution():
    """Not reported elsewhere: oneDNN fuses a filter gradient and a bias gradient that read
    the same operation, even if they read different outputs of it."""
    model = keras.Sequential(
        [keras.Input((4, 4, 3)), layers.ReLU(), layers.Conv2DTranspose(3, 3, 2, padding="same")]
    )
    x, y = normals(2, 4, 4, 3), normals(2, 8, 8, 3)
    stock = gradients(model, x, y)
    assert small.bits(gradients(bt.compress(model), x, y)) == small.bits(stock)


# Memory


def kept_in_backward(model, x):
    """Bytes of the tensors that the forward pass makes and the backward pass reads."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    function = tf.compat.v1.wrap_function(step, [tf.TensorSpec(x.shape, x.dtype)])
    behind = ("gradient_tape/", "backward/")
    kept = {
        tensor.name: tensor
        for op in function.graph.get_operations()
        if op.name.startswith(behind)
        and op.type not in ("Shape", "ZerosLike", "BroadcastGradientArgs")
        for tensor in op.inputs
        if not tensor.op.name.startswith(behind) and tensor.dtype != tf.resource
    }
    values = function.prune(function.inputs[0], list(kept.values()))(x)
    # A view, or the same tensor by way of an identity, is no second copy.
    distinct = {value.numpy().tobytes() for value in values}
    return sum(map(len, distinct))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(layers.Conv2D(8, 3, name="conv"), (4, 16, 16, 8)), (layers.Dense(8), (64, 32))],
)
def test_one_layer_alone_costs_nothing(layer, shape):
    """actnn#35: one extracted layer took more memory compressed than not.

    Its input comes from outside and has no recipe, so nothing is encoded at all.
    """
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    x = tf.constant(np.maximum(normals(*shape), 0))
    stock = kept_in_backward(model, x)
    assert stock
    bt.compress(model)
    assert kept_in_backward(model, x) == stock

    @tf.function
    def forward(x):
        with tf.GradientTape():
            return model(x, training=True)

    graph = forward.get_concrete_function(x).graph
    assert not [op.name for op in graph.get_operations() if "encode" in op.name]


@pytest.mark.parametrize("build", [small.mlp, small.transformer])
def test_dense_activations_cost_little(build):
    """actnn#34, #7: small multilayer perceptrons, GELU. At most 1/32 more is kept."""
    task = small.seeded(build)
    x = tf.constant(task.x)
    stock = kept_in_backward(task.model, x)
    assert kept_in_backward(bt.compress(task.model, codec="bitmap"), x) <= stock * (1 + 1 / 32)


# Second derivatives


@pytest.mark.parametrize("graph", [False, True])
def test_gradient_penalty_raises(graph):
    """tensorflow#36168, #34503: WGAN-GP through a custom gradient got silent zeros."""
    critic = small.seeded(small.convolutions).model
    x = tf.constant(small.convolutions().x)

    def penalty_gradients():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = critic(x, training=True)
            slopes = tf.norm(tf.reshape(inner.gradient(score, x), [4, -1]), axis=1)
            penalty = tf.reduce_mean((slopes - 1.0) ** 2)
        return outer.gradient(penalty, critic.trainable_variables)

    run = tf.function(penalty_gradients) if graph else penalty_gradients
    stock = [g for g in run() if g is not None]
    assert stock
    bt.compress(critic)
    run = tf.function(penalty_gradients) if graph else penalty_gradients
    with pytest.raises(NotImplementedError, match=r"second derivative.*restore"):
        run()
    bt.restore(critic)
    run = tf.function(penalty_gradients) if graph else penalty_gradients
    assert small.bits(g for g in run() if g is not None) == small.bits(stock)
