"""How recipes travel: what is encoded, how often, and what differentiating twice does."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import ancestors, assert_same_bits, calls, histogram, put_on, sparse
from keras import layers

import bittrain_tf as bt
from bittrain_tf import recipes

pytestmark = pytest.mark.usefixtures("backend")

SECOND = "second derivative.*restore.*filters"
IMAGE = (8, 8, 9)  # of fewer channels a convolution is computed again, not encoded


def model(*middle, head=True) -> keras.Model:
    """Convolution, ReLU, what is given, and a dense head."""
    inputs = keras.Input(IMAGE)
    x = layers.ReLU(name="relu")(layers.Conv2D(4, 3, padding="same")(inputs))
    for layer in middle:
        x = layer(x)
    return keras.Model(
        inputs, layers.Dense(2)(layers.Flatten(name="before_head")(x)) if head else x
    )


def train_graph(model: keras.Model) -> tf.Graph:
    """The graph of a loss and its gradients."""

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return step.get_concrete_function(tf.TensorSpec((2, *model.input_shape[1:]))).graph


def gradients(model: keras.Model, x: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x, training=True) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def test_branches_are_rebuilt_one_after_the_other():
    """At the same time, they would take twice the memory whenever threads run that way."""
    inputs = keras.Input(IMAGE)

    def branch(name: str) -> keras.KerasTensor:
        x = layers.ReLU(name=f"{name}_relu")(layers.Conv2D(4, 3, name=f"{name}_before")(inputs))
        return layers.Conv2D(4, 3, name=f"{name}_after")(x)

    two = keras.Model(inputs, layers.Add(name="sum")([branch("left"), branch("right")]))
    bt.compress(two)
    graph = train_graph(two)
    # Others are traced but never run.
    needed = set().union(*(ancestors(output.op) for output in graph.outputs))
    ops = [op for op in needed if "backward/" in op.name]

    def of(name: str, kind: str) -> set[tf.Operation]:
        return {op for op in ops if f"/{name}_after" in op.name and kind in op.type}

    filters = {name: of(name, "BackpropFilter") for name in ("left", "right")}
    rebuilt = {name: {op for op in of(name, "IdentityN") if op.control_inputs} for name in filters}
    assert all(filters.values())
    assert all(rebuilt.values())
    in_order = [
        all(filters[first] <= ancestors(op) for op in rebuilt[second])
        for first, second in (("left", "right"), ("right", "left"))
    ]
    assert sorted(in_order) == [False, True]


def test_a_rebuilt_input_is_gone_before_the_gradient_of_it_is_there():
    """Of the three tensors of a wide layer's size two are alive at a time."""
    model = keras.Sequential(
        [
            keras.Input(IMAGE),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Conv2D(4, 3, name="conv"),
            layers.ReLU(),
            layers.DepthwiseConv2D(3, name="depthwise", activation="relu"),
            layers.Flatten(),
            layers.Dense(4, name="product"),
        ]
    )
    bt.compress(model)
    graph = train_graph(model)
    needed = set().union(*(ancestors(output.op) for output in graph.outputs))
    for name, of_input, of_weights in (
        ("conv", "Conv2DBackpropInput", "Conv2DBackpropFilter"),
        ("depthwise", "DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter"),
        ("product", "MatMul", "MatMul"),
    ):
        ops = [
            op
            for op in graph.get_operations()
            if f"/{name}_1/" in op.name or f"/{name}/" in op.name
        ]
        backward = [op for op in ops if "backward/" in op.name]
        last = max(
            (op for op in backward if op.type == of_input and op in needed), key=number(graph)
        )
        assert any(
            op.type == of_weights and op is not last for op in ancestors(last) & set(backward)
        ), name


def number(graph):
    numbers = {op.name: i for i, op in enumerate(graph.get_operations())}
    return lambda op: numbers[op.name]


def test_an_output_read_twice_is_encoded_once():
    inputs = keras.Input(IMAGE)
    x = layers.ReLU()(layers.Conv2D(4, 3)(inputs))
    readers = [layers.Conv2D(2, 3, name=name)(x) for name in ("first", "second")]
    graph = train_graph(bt.compress(keras.Model(inputs, layers.Add()(readers))))
    assert len(calls(graph, "encode_bitmap")) == 1
    assert len(calls(graph, "encode_mask")) == 1
    assert len(calls(graph, "decode_bitmap")) == 1  # the two read it one after the other


@pytest.mark.parametrize(
    "view",
    [
        layers.Flatten(),
        layers.Reshape((4, 64)),
        layers.Permute((3, 1, 2)),
        layers.ZeroPadding2D(2),
        layers.Cropping2D(1),
        layers.UpSampling2D(2),
        layers.UpSampling2D(2, interpolation="bilinear"),
    ],
    ids=lambda layer: layer.name,
)
def test_recipes_pass_through_views(view):
    graph = train_graph(bt.compress(model(view)))
    # The size before the view: cropping, padding and repeating happen after decoding.
    (encoded,) = calls(graph, "encode_bitmap")
    assert encoded.inputs[0].shape.num_elements() == 2 * 8 * 8 * 4


def test_concatenated_pieces_are_encoded_each_once():
    inputs = keras.Input(IMAGE)
    pieces = [layers.ReLU()(layers.Conv2D(4, 3, padding="same")(inputs))]
    for _ in range(3):
        joined = layers.Concatenate()(pieces) if len(pieces) > 1 else pieces[0]
        pieces.append(layers.ReLU()(layers.Conv2D(4, 3, padding="same")(joined)))
    graph = train_graph(bt.compress(keras.Model(inputs, pieces[-1])))
    assert len(calls(graph, "encode_bitmap")) == 3  # the last ReLU's output is read by nobody


def test_concatenation_with_integers():
    relu, join, dense = (put_on(x) for x in (layers.ReLU(), layers.Concatenate(), layers.Dense(3)))
    x, labels = tf.Variable(sparse((4, 5))), tf.ones([4, 2], tf.int32)
    with tf.GradientTape() as tape:
        joined = join([relu(x * 1.0), labels])
        loss = tf.reduce_sum(dense(joined))
    expected = tf.matmul(joined, tf.ones([4, 3]), transpose_a=True)
    np.testing.assert_array_equal(tape.gradient(loss, dense.kernel), expected)


def test_nothing_is_encoded_when_nobody_saves_it():
    graph = train_graph(bt.compress(model(layers.GlobalAveragePooling2D())))
    assert calls(graph, "encode_bitmap") == []


def test_frozen_layers_encode_nothing():
    frozen = model(layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D())
    for layer in frozen.layers[:-1]:
        layer.trainable = False
    graph = train_graph(bt.compress(frozen))
    assert calls(graph, "encode_bitmap") == []


def test_inference_is_the_stock_graph():
    net = model(
        layers.BatchNormalization(), layers.MaxPooling2D(), layers.Dropout(0.5), layers.Conv2D(4, 3)
    )
    signature = tf.TensorSpec((2, *IMAGE))

    def predict_graph():
        return tf.function(lambda x: net(x, training=False)).get_concrete_function(signature).graph

    stock = histogram(predict_graph())
    bt.compress(net)
    assert histogram(predict_graph()) == stock


def test_a_loop_body_cannot_use_recipes_from_outside():
    relu, conv = layers.ReLU(), layers.Conv2D(4, 3, padding="same")
    x = tf.constant(sparse((2, *IMAGE[:2], 4)))
    conv.build(x.shape)

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            tape.watch(factor)
            read = relu(x * factor)
            y = tf.while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, relu(y + conv(read))), [0, read]
            )[1]
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, [factor, conv.kernel.value])

    expected = step(tf.constant(0.5))
    put_on(relu), put_on(conv)
    actual = tf.function(step.python_function)(tf.constant(0.5))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_branch_can_read_from_outside():
    net = model(head=False)
    conv = layers.Conv2D(4, 3)
    x = tf.constant(sparse((2, *IMAGE)))
    conv.build((2, 8, 8, 4))

    @tf.function
    def step(flag):
        with tf.GradientTape() as tape:
            read = net(x, training=True)
            y = tf.cond(flag, lambda: conv(read), lambda: 2 * conv(read))
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, [*net.trainable_variables, conv.kernel.value])

    expected = step(tf.constant(True))
    bt.compress(net)
    put_on(conv)
    actual = tf.function(step.python_function)(tf.constant(True))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_an_eager_tensor_captured_by_a_graph():
    relu, dense = layers.ReLU(), layers.Dense(3)
    dense.build((4, 6))
    put_on(relu), put_on(dense)
    with tf.GradientTape():
        read = relu(tf.constant(sparse((4, 6))) * tf.Variable(1.0))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(read))
        return tape.gradient(loss, dense.kernel)

    np.testing.assert_array_equal(step(), tf.matmul(read, tf.ones([4, 3]), transpose_a=True))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradients_that_are_slices(graph):
    """`tf.gather` sends back `tf.IndexedSlices`."""
    relu = layers.ReLU()
    x = tf.constant(sparse((4, 6)))

    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            read = tf.gather(relu(x), [0, 2, 2])
            loss = tf.reduce_sum(read * read)
        return tf.convert_to_tensor(tape.gradient(loss, x))

    expected = step()
    put_on(relu)
    assert_same_bits(tf.abs((tf.function(step) if graph else step)()), tf.abs(expected))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_tape_around_a_function(graph):
    net = model(layers.MaxPooling2D(), layers.Conv2D(3, 3, activation="relu"))
    x = tf.constant(sparse((2, *IMAGE)))
    expected = gradients(net, x)
    bt.compress(net)
    forward = tf.function(lambda: tf.reduce_sum(net(x, training=True) ** 2))

    def step():
        with tf.GradientTape() as tape:
            loss = forward()
        return tape.gradient(loss, net.trainable_variables)

    for a, b in zip((tf.function(step) if graph else step)(), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def through(*middle):
    return bt.compress(model(*middle))


SECOND_ORDER = {
    "convolution": lambda: through(layers.Conv2D(4, 3)),
    "batch normalization": lambda: through(layers.BatchNormalization(), layers.Conv2D(4, 3)),
    "max pooling": lambda: through(layers.MaxPooling2D(), layers.Conv2D(4, 3)),
    "dropout": lambda: through(layers.Dropout(0.5), layers.Conv2D(4, 3)),
    "view": lambda: through(layers.ZeroPadding2D(), layers.Conv2D(4, 3)),
    "gelu": lambda: through(layers.Activation("gelu"), layers.Conv2D(4, 3)),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("of", ["weights", "inputs"])
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_second_derivatives_are_refused(name, of, graph):
    net = SECOND_ORDER[name]()
    x = tf.constant(sparse((2, *IMAGE)))

    def twice():
        variables = net.trainable_variables if of == "weights" else [x]
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(net(x, training=True) ** 2)
            squares = [tf.reduce_sum(g**2) for g in inner.gradient(loss, variables)]
            penalty = tf.add_n(squares)
        return outer.gradient(penalty, variables)

    with pytest.raises(NotImplementedError, match=SECOND):
        (tf.function(twice) if graph else twice)()


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_gradient_penalty_is_refused_and_works_once_restored(graph):
    critic = model(layers.Conv2D(2, 3, activation="relu"))
    x = tf.constant(sparse((2, *IMAGE)))

    def penalty_gradients():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = critic(x, training=True)
            norm = tf.norm(tf.reshape(inner.gradient(score, x), [2, -1]), axis=1)
            penalty = tf.reduce_mean((norm - 1) ** 2)
        kernels = [v for v in critic.trainable_variables if v.name == "kernel"]
        return outer.gradient(penalty, kernels)

    def run():
        return (tf.function(penalty_gradients) if graph else penalty_gradients)()

    expected = run()
    bt.compress(critic)
    with pytest.raises(NotImplementedError, match=SECOND):
        run()
    bt.restore(critic)
    for a, b in zip(run(), expected, strict=True):
        assert_same_bits(a, b)


def test_eagerly_each_tensor_is_rebuilt_once_a_gradient():
    """Not once a path: in a chain of sums, of which there are two to the number of sums."""
    calls = []

    def double(a, b):
        calls.append(None)
        return a + b

    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.identity(x)
        for _ in range(20):
            derived = recipes.Derived(double, [y, y])
            y = recipes.attach(y + y, derived)
        loss = tf.reduce_sum(recipes.keep_inputs(tf.square, y))
    gradient = tape.gradient(loss, x)
    assert len(calls) == 20
    np.testing.assert_array_equal(gradient, 2 * 4.0**20 * np.array([1.0, 2.0]))


def test_vectorized_map_has_its_gradients():
    """Its translation of a graph forgets custom gradients; layers are stock in there."""
    layer = put_on(keras.layers.Dense(3, activation="relu", name="mapped"))
    layer.build((2, 4))
    x = tf.random.stateless_normal((5, 2, 4), seed=(1, 2))

    @tf.function
    def gradients(mapped):
        with tf.GradientTape() as tape:
            y = tf.vectorized_map(layer, x) if mapped else layer(x)
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    for a, b in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
