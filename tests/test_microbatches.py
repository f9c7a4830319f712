"""A step in microbatches is the same step, and keeps the activations of one of them."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

pytest.importorskip("ai_edge_litert")
from tflite_tools import exporting, microbatches, scheduling
from tflite_tools.lowering import lower
from tflite_tools.training import Training

BATCH, SIZE, CHANNELS = 4, 6, 8
EPS = np.finfo(np.float32).eps


def normalized(x, w):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    return (x - mean) * tf.math.rsqrt(variance + 1e-3) * w[0, 0, 0]


def attention(x, w):
    rows = tf.reshape(x, [BATCH, SIZE * SIZE, CHANNELS])
    scores = tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True))
    return tf.matmul(scores, rows) * w[0, 0, 0]


# What is done to a batch, and the operation that must be there as often as there are microbatches;
# None for what cannot be divided.
CASES = {
    "elementwise": (lambda x, w: tf.nn.relu6(x * w[0, 0, 0] + x) - 1, "Relu6"),
    "convolution": (lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), "Conv2D"),
    "depthwise": (
        lambda x, w: tf.nn.depthwise_conv2d(x, w[:, :, :, 0:1], [1] * 4, "SAME"),
        "DepthwiseConv2dNative",
    ),
    "max_pool": (lambda x, w: tf.nn.max_pool2d(x * w[0, 0, 0], 2, 2, "SAME"), "MaxPool"),
    "average_pool": (lambda x, w: tf.nn.avg_pool2d(x * w[0, 0, 0], 3, 2, "SAME"), "AvgPool"),
    "dense": (
        lambda x, w: tf.nn.softmax(
            tf.matmul(tf.reshape(x, [BATCH * SIZE * SIZE, CHANNELS]), w[0, 0])
        ),
        "Softmax",
    ),
    "mean_of_image": (lambda x, w: tf.reduce_mean(x * w[0, 0, 0], [1, 2]), "Mean"),
    "mean_of_batch": (lambda x, w: tf.reduce_mean(x * w[0, 0, 0], [0, 1]), "Mean"),
    "sum_of_batch": (lambda x, w: tf.reduce_sum(x * w[0, 0, 0], 0), "Sum"),
    "maximum_of_batch": (lambda x, w: tf.reduce_max(x * w[0, 0, 0], 0), None),
    "normalized": (normalized, "SquaredDifference"),
    "attention": (attention, "BatchMatMulV2"),
    "normalized_groups": (
        lambda x, w: tf.reduce_mean(
            tf.reshape(x * w[0, 0, 0], [BATCH, SIZE, SIZE, 2, 4]), [1, 2, 4], keepdims=True
        ),
        "Mean",
    ),
    "softmax_of_the_batch": (
        lambda x, w: tf.nn.softmax(tf.reduce_sum(x * w[0, 0, 0], [1, 2, 3])),
        None,
    ),
    "choice_of_rows": (
        lambda x, w: tf.raw_ops.Select(
            condition=tf.constant([True, False, True, True]), x=x * w[0, 0, 0], y=3 * x
        ),
        "Select",
    ),
    "passed_on_together": (
        lambda x, w: tf.add_n([tf.reduce_mean(t) for t in tf.identity_n([2 * x, w])]) * x,
        "Mul",
    ),
    "pad": (lambda x, w: tf.pad(x * w[0, 0, 0], [[0, 0], [1, 2], [0, 0], [0, 0]]), "Pad"),
    "pad_batch": (lambda x, w: tf.pad(x * w[0, 0, 0], [[4, 0], [0, 0], [0, 0], [0, 0]]), None),
    "transpose": (lambda x, w: tf.transpose(x * w[0, 0, 0], [0, 3, 1, 2]), "Transpose"),
    "transpose_batch": (lambda x, w: tf.transpose(x * w[0, 0, 0], [3, 1, 2, 0]), None),
    "concatenate": (lambda x, w: tf.concat([x, x * w[0, 0, 0]], -1), "ConcatV2"),
    "slice": (lambda x, w: x[:, 1:4] * w[0, 0, 0], "StridedSlice"),
    "slice_batch": (lambda x, w: x[1:] * w[0, 0, 0], None),
    "tile": (lambda x, w: tf.tile(x * w[0, 0, 0], [1, 2, 1, 1]), "Tile"),
    "expand": (lambda x, w: tf.expand_dims(x * w[0, 0, 0], 1), "ExpandDims"),
    "squeeze": (lambda x, w: tf.squeeze((x * w[0, 0, 0])[:, :1], 1), "Squeeze"),
    "broadcast": (
        lambda x, w: tf.broadcast_to(x[:, :1] * w[0, 0, 0], [BATCH, SIZE, SIZE, CHANNELS]),
        "BroadcastTo",
    ),
    "embedding": (
        lambda x, w: tf.gather(w[0, 0], tf.cast(tf.abs(x[..., 0]) > 1, tf.int32)),
        "GatherV2",
    ),
    "one_hot": (
        lambda x, w: tf.one_hot(tf.cast(x[..., 0] > 0, tf.int32), 2) * w[0, 0, 0, 0],
        "OneHot",
    ),
}


def step(fn):
    def compute(x, w):
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = fn(x, w)
            loss = tf.reduce_sum(y * tf.sin(y))
        dx, dw = tape.gradient(loss, [x, w], unconnected_gradients="zero")
        return {"y": y, "dx": tf.convert_to_tensor(dx), "dw": tf.convert_to_tensor(dw)}

    return compute


@pytest.mark.parametrize("name", CASES)
def test_the_same_values_and_gradients(name, monkeypatch):
    monkeypatch.setattr(microbatches, "_LARGE", 0)
    fn, divided = CASES[name]
    rng = np.random.default_rng(0)
    shapes = (BATCH, SIZE, SIZE, CHANNELS), (3, 3, CHANNELS, CHANNELS)
    arrays = [tf.constant(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    specs = [tf.TensorSpec(s, tf.float32, n) for s, n in zip(shapes, "xw", strict=True)]
    whole = lower(step(fn), specs).get_concrete_function()
    parts = lower(step(fn), specs, batched=1, microbatches=BATCH).get_concrete_function()
    if divided is not None:
        counts = [
            collections.Counter(o.type for o in f.graph.get_operations())[divided]
            for f in (whole, parts)
        ]
        assert counts[1] >= max(BATCH, counts[0])
    for key, expected in whole(*arrays).items():
        found = parts(*arrays)[key].numpy()
        # Sums of as many terms as the batch has elements, in another order (Higham, 2002, 4.2).
        terms = BATCH * SIZE * SIZE if key == "dw" or "batch" in name or name == "normalized" else 9
        scale = np.max(np.abs(expected)) + 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=4 * terms * EPS * scale)


def model(normalization=False):
    inputs = x = keras.Input((16, 16, 3))
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x) if normalization else x
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def train_peak(built, parts):
    loss = keras.losses.MeanSquaredError()
    training = Training(built, loss, keras.optimizers.SGD(0.1), {}, 8, False)
    file = exporting.converted(training, parts)
    scheduled = scheduling.arrange(file)
    (train,) = [s for s in scheduled if s.subgraph == "train"]
    return train.after, train.operators


def test_one_microbatch_is_alive_at_a_time():
    keras.utils.set_random_seed(0)
    whole, _ = train_peak(model(), 1)
    parts, _ = train_peak(model(), 8)
    activation = 8 * 16 * 16 * 16 * 4
    assert whole > 6 * activation
    # An eighth of that, and what does not depend on the batch: weights, their gradients, and the
    # patches of one convolution.
    assert parts < whole / 2


def test_small_tensors_of_coupled_samples_stay_whole():
    keras.utils.set_random_seed(0)
    _, whole = train_peak(model(normalization=True), 1)
    _, parts = train_peak(model(normalization=True), 8)
    assert parts == whole  # none of its tensors is of half a megabyte


@pytest.mark.parametrize(("batch_size", "expected"), [(1, 1), (7, 7), (8, 8), (11, 1), (32, 8)])
def test_count_divides_the_batch(batch_size, expected):
    assert microbatches.count(batch_size) == expected
