"""What stands in for an operation computes the same: each rule against TensorFlow's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from harness import skipping_missing_kernels

pytest.importorskip("ai_edge_litert")
from tflite_tools.lowering import lower
from tflite_tools.rules import find

EPS = np.finfo(np.float32).eps


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gradients(fn, *inputs):
    """The gradients of `fn`, as a function of its inputs and of the gradient of its output."""

    def compute(*tensors):
        *tensors, dy = tensors
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            y = fn(*tensors)
        found = tape.gradient(y, list(tensors), output_gradients=dy)
        return {f"d{i}": dx for i, dx in enumerate(found)}

    shape = fn(*map(tf.constant, inputs)).shape
    return compute, [*inputs, normal(*shape, seed=1)]


def both(fn, arrays, types):
    """What the function computes as it is and lowered; it must have used the rules of `types`."""
    specs = [tf.TensorSpec(a.shape, a.dtype, f"a{i}") for i, a in enumerate(arrays)]
    traced = tf.function(fn, input_signature=specs, autograph=False).get_concrete_function()
    used = {op.type for op in traced.graph.get_operations()}
    assert set(types) <= used, f"not traced: {set(types) - used}"
    assert all(find(name) for name in types)
    lowered = lower(fn, specs).get_concrete_function()
    left = {op.type for op in lowered.graph.get_operations()} & set(types) - {"Conv2D", "Sum"}
    assert not left
    tensors = [tf.constant(a) for a in arrays]
    with skipping_missing_kernels():
        expected = {k: v.numpy() for k, v in traced(*tensors).items()}
        return expected, {k: v.numpy() for k, v in lowered(*tensors).items()}


def conv(strides=1, padding="SAME", dilations=1):
    return lambda x, w: tf.nn.conv2d(x, w, strides, padding, dilations=dilations)


def depthwise(strides=1, padding="SAME"):
    return lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, strides, strides, 1], padding)


def resize(kind, size, **options):
    options = {"align_corners": False, "half_pixel_centers": False, **options}
    return lambda x: getattr(tf.raw_ops, kind)(images=x, size=size, **options)


# Sums of products: of n terms, each of two orders of summation is off by at most n eps of the
# sum of the terms' absolute values (Higham, Accuracy and Stability, 2002, section 4.2).
CONV = ("Conv2DBackpropInput", "Conv2DBackpropFilter")
DEPTHWISE = ("DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter")
SUMS = {
    "conv": (conv(), [(2, 9, 8, 3), (3, 3, 3, 4)], CONV),
    "conv valid": (conv(padding="VALID"), [(2, 9, 8, 3), (3, 2, 3, 4)], CONV),
    "conv strides": (conv(2), [(2, 9, 8, 3), (3, 3, 3, 4)], CONV),
    "conv strides valid": (conv(2, "VALID"), [(2, 10, 8, 3), (3, 3, 3, 4)], CONV),
    "conv unequal strides": (conv([2, 3]), [(2, 10, 9, 3), (3, 3, 3, 4)], CONV),
    "conv strides beyond the kernel": (conv(3, "VALID"), [(2, 10, 9, 3), (2, 2, 3, 4)], CONV),
    "conv dilations": (conv(dilations=2), [(2, 9, 8, 3), (3, 3, 3, 4)], CONV),
    "conv explicit": (
        conv(2, [[0, 0], [1, 2], [0, 1], [0, 0]]),
        [(2, 9, 8, 3), (3, 3, 3, 4)],
        CONV,
    ),
    "conv 1x1": (conv(), [(2, 9, 8, 3), (1, 1, 3, 4)], CONV),
    "conv 1x1 strides": (conv(2), [(2, 9, 8, 3), (1, 1, 3, 4)], CONV),
    "conv by sample": (conv(), [(3, 40, 40, 24), (3, 3, 24, 4)], CONV),
    "depthwise": (depthwise(), [(2, 9, 8, 3), (3, 3, 3, 1)], DEPTHWISE),
    "depthwise strides": (depthwise(2), [(2, 9, 8, 3), (3, 3, 3, 1)], DEPTHWISE),
    "depthwise valid": (depthwise(2, "VALID"), [(2, 10, 8, 3), (3, 3, 3, 1)], DEPTHWISE),
    "conv groups": (conv(2), [(2, 9, 8, 6), (3, 3, 2, 6)], CONV),
    "conv groups 1x1": (conv(), [(2, 9, 8, 6), (1, 1, 3, 4)], CONV),
    "depthwise multiplier": (depthwise(2), [(2, 9, 8, 3), (3, 3, 3, 2)], DEPTHWISE),
    "average pool": (lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"), [(2, 9, 8, 3)], ["AvgPoolGrad"]),
    "average pool same": (
        lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"),
        [(2, 9, 8, 3)],
        ["AvgPoolGrad"],
    ),
    "bias": (tf.nn.bias_add, [(2, 3, 3, 4), (4,)], ["BiasAddGrad"]),
    "broadcast": (lambda x, y: x * y, [(2, 3, 1), (1, 3, 4)], ["Sum"]),
    "sum of many dimensions": (
        lambda x: tf.reduce_sum(tf.tile(x, [2, 3, 1, 2, 2]), [1]),
        [(1, 2, 3, 2, 1)],
        ["Sum"],
    ),
    **{
        f"{kind} {size} {option}": (
            resize(kind, size, **{option: True}),
            [(2, 5, 4, 3)],
            [f"{kind}Grad"],
        )
        for kind in ("ResizeBilinear", "ResizeNearestNeighbor")
        for size in ((10, 8), (7, 3), (1, 9))
        for option in ("align_corners", "half_pixel_centers")
    },
    "ResizeBilinear legacy": (
        resize("ResizeBilinear", (8, 3)),
        [(2, 5, 4, 3)],
        ["ResizeBilinearGrad"],
    ),
    "ResizeNearestNeighbor legacy": (
        resize("ResizeNearestNeighbor", (8, 3)),
        [(2, 5, 4, 3)],
        ["ResizeNearestNeighborGrad"],
    ),
    "slice": (lambda x: x[:, 1:3, 0], [(2, 5, 3)], ["StridedSliceGrad"]),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums(name):
    fn, shapes, types = SUMS[name]
    compute, arrays = gradients(fn, *[normal(*s, seed=k) for k, s in enumerate(shapes)])
    expected, found = both(compute, arrays, types)
    magnitudes = compute(*[tf.constant(np.abs(a)) for a in arrays])
    for key, value in expected.items():
        terms = max(a.size for a in arrays)
        bound = terms * EPS * magnitudes[key].numpy() + np.finfo(np.float32).tiny
        assert np.all(np.abs(found[key] - value) <= bound)
        # The bound is for the worst case; a term too many or too few is seen by this one.
        assert np.allclose(found[key], value, atol=1e-3 * np.abs(value).max())


POOLS = {
    "max pool": lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"),
    "max pool same": lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"),
    "max pool overlapping": lambda x: tf.nn.max_pool2d(x, 3, 1, "SAME"),
    "max pool unequal": lambda x: tf.nn.max_pool2d(x, [2, 3], [2, 1], "VALID"),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("ties", [False, True])
def test_max_pool(name, ties):
    """With ties, it is the first of the maxima that gets the gradient."""
    x = normal(2, 9, 8, 3)
    x = np.round(x) if ties else x
    compute, arrays = gradients(POOLS[name], x)
    # Small whole numbers add up exactly in any order.
    arrays[-1] = np.round(arrays[-1] * 8)
    expected, found = both(compute, arrays, ["MaxPoolGrad"])
    assert np.array_equal(expected["d0"], found["d0"])


FUNCTIONS = {
    "relu": (tf.nn.relu, ["ReluGrad"]),
    "relu6": (tf.nn.relu6, ["Relu6Grad"]),
    "leaky relu": (lambda x: tf.nn.leaky_relu(x, 0.3), ["LeakyReluGrad"]),
    "elu": (tf.nn.elu, ["EluGrad"]),
    "selu": (tf.nn.selu, ["Selu", "SeluGrad"]),
    "sigmoid": (tf.sigmoid, ["SigmoidGrad"]),
    "tanh": (tf.tanh, ["TanhGrad"]),
    "softplus": (tf.nn.softplus, ["Softplus"]),
    "softsign": (tf.nn.softsign, ["SoftsignGrad"]),
    "rsqrt": (lambda x: tf.math.rsqrt(tf.abs(x) + 0.1), ["RsqrtGrad"]),
    "sqrt": (lambda x: tf.sqrt(tf.abs(x) + 0.1), ["SqrtGrad"]),
    "reciprocal": (lambda x: tf.math.reciprocal(tf.abs(x) + 0.1), ["Reciprocal", "ReciprocalGrad"]),
    "gelu": (tf.nn.gelu, ["Erfc"]),
    "erf": (tf.math.erf, ["Erf"]),
    "log1p": (lambda x: tf.math.log1p(tf.abs(x) * 1e-4), ["Log1p"]),
    "expm1": (tf.math.expm1, ["Expm1"]),
    "xlogy": (lambda x: tf.math.xlogy(tf.nn.relu(x), tf.abs(x) + 0.1), ["Xlogy"]),
    "divide": (lambda x: tf.math.divide_no_nan(x, tf.nn.relu(x)), ["DivNoNan"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """Values and gradients, to some units in the last place of the largest intermediate."""
    fn, types = FUNCTIONS[name]
    x = np.concatenate([normal(200) * 3, [0.0, -0.0, 1.0, -1.0, 5.0, -5.0]]).astype(np.float32)

    def compute(x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return {"y": y, "dx": tape.gradient(y, x, output_gradients=dy)}

    expected, found = both(compute, [x, np.ones_like(x)], types)
    for key, value in expected.items():
        # Neither does more than 16 roundings, on values not above these.
        size = np.maximum(np.abs(value), np.abs(x) * np.max(np.abs(expected["dx"]) + 1))
        assert np.all(np.abs(found[key] - value) <= 16 * EPS * np.maximum(size, EPS)), key


@pytest.mark.parametrize("sparse", [False, True])
def test_softmax_cross_entropy(sparse):
    logits = normal(6, 10) * 4
    classes = np.arange(6, dtype=np.int32)

    def compute(logits, classes):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            # The raw operations, in place of which TensorFlow takes others where operations are
            # to be deterministic.
            if sparse:
                y, _ = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
                    features=logits, labels=classes
                )
            else:
                y, _ = tf.raw_ops.SoftmaxCrossEntropyWithLogits(
                    features=logits, labels=tf.one_hot(classes, 10)
                )
        return {"y": y, "dx": tape.gradient(y, logits)}

    kind = "Sparse" if sparse else ""
    expected, found = both(compute, [logits, classes], [f"{kind}SoftmaxCrossEntropyWithLogits"])
    # The largest logit is below 16; ten exponentials are summed.
    assert np.all(np.abs(found["y"] - expected["y"]) <= 32 * EPS * 16)
    assert np.all(np.abs(found["dx"] - expected["dx"]) <= 32 * EPS)
