"""Every compressed layer against itself with the codec "dense", and against stock Keras.

Its output is kept or rebuilt by its readers as the layer sees fit, or by choice.

The layer stands between a compressed ReLU or dropout behind trainable factors, whose
recipe it finds on its input, and a product that saves its output by the recipe the
layer attached. All gradients and all state are compared, bit for bit, except those of
batch normalization, which has a backward pass of its own, and that of the input of
self-attention whose scores are rebuilt, which is added up in another order.

Graphs run without TensorFlow's graph rewriting, which fuses and reorders operations
differently in the two graphs (a tanh after a product, a division by a constant), except
in `test_optimized_graph`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness import assert_same_bits, put_on, skipping_missing_kernels, sparse, to_numpy
from keras import layers
from layer_cases import CASES, PLAIN_CASES, Case

from bittrain_tf import recipes
from bittrain_tf.layers import KEEP, REBUILD, registered_layers, skip_reason

pytestmark = pytest.mark.usefixtures("backend")

NARROW = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class Step:
    """Forward and backward through one case, as a model would run it."""

    def __init__(
        self, case: Case, policy: str, codec: str | None, choice: str | None = None
    ) -> None:
        keras.utils.set_random_seed(3)
        self.case = case
        layer = self._layer(case, policy)
        front = (
            keras.layers.Dropout(0.4, dtype=policy)
            if case.signed
            else keras.layers.ReLU(dtype=policy)
        )
        product = keras.layers.Multiply(dtype=policy)
        self.layer, self.front, self.product = (
            put_on(x, codec, choice) for x in (layer, front, product)
        )
        width = policy if policy == "float64" else "float32"
        count = max(1, case.inputs)
        self.xs = [tf.constant(sparse(case.shape, width, 0.9, seed=i)) for i in range(count)]
        self.factors = [
            tf.Variable(sparse(case.shape[1:], width, 1.0, seed=7 + i)) for i in range(count)
        ]

    @staticmethod
    def _layer(case: Case, policy: str) -> keras.layers.Layer:
        layer = case.make(policy)
        if case.attends:
            layer.build(*[case.shape] * max(2, case.inputs))
        else:
            layer.build([case.shape] * case.inputs if case.inputs else case.shape)
        if case.prepare is not None:
            case.prepare(layer)
        for seed, weight in enumerate(layer.trainable_variables + layer.non_trainable_variables):
            if weight.dtype.startswith("float"):
                weight.assign(0.1 + np.abs(sparse(weight.shape, density=1.0, seed=seed)))
        assert skip_reason(layer) is None
        return layer

    def run(self, training: bool) -> dict[str, tf.Tensor | None]:
        weights = [v.value for v in self.layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(self.xs)
            read = [
                self.front(x * f, training=training)
                for x, f in zip(self.xs, self.factors, strict=True)
            ]
            y, *others = tf.nest.flatten(self._call(read, training))
            scale = tf.cast(output_factor(y.shape), y.dtype)
            tape.watch(scale)
            # Read once here: of three gradients (an activity regularizer has another), the
            # sum would depend on the order.
            read_again = self.product([y, scale])
            loss = tf.reduce_sum(read_again * tf.cast(loss_weights(y.shape), y.dtype))
            losses = [loss, *map(tf.reduce_sum, others), *self.layer.losses]
            loss = tf.add_n([tf.cast(t, tf.float64) for t in losses])
        gradients = tape.gradient(loss, [self.xs, self.factors, weights, [scale]])
        names = ("input", "factor", "weight", "scale")
        return {
            "output": y,
            **{
                f"gradient of {n} {i}": g
                for n, gs in zip(names, gradients, strict=True)
                for i, g in enumerate(gs)
            },
        }

    def _call(self, read: list[tf.Tensor], training: bool) -> Any:
        case = self.case
        if case.attends:
            read = read * 2 if case.inputs == 0 else read
            return self.layer(*read, training=training, **case.call)
        return self.layer(read if case.inputs else read[0], training=training)


def output_factor(shape: Any) -> np.ndarray:
    return sparse(shape, density=1.0, seed=11)


def loss_weights(shape: Any) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape) % 5 - 2


def results(
    case: Case,
    policy: str,
    codec: str | None,
    graph: bool,
    training: bool,
    choice: str | None = None,
) -> dict[str, np.ndarray | None]:
    step = Step(case, policy, codec, choice)
    found = (tf.function(step.run) if graph else step.run)(training)
    state = {f"state {i}": v.value for i, v in enumerate(step.layer.non_trainable_variables)}
    return {name: None if x is None else to_numpy(x) for name, x in {**found, **state}.items()}


# TensorFlow's CPU kernel of 3D max pooling knows neither of these.
_WITHOUT_KERNEL = {
    (keras.layers.MaxPooling3D, "mixed_float16"),
    (keras.layers.MaxPooling3D, "float64"),
}
CASES_BY_POLICY = [
    (case, policy)
    for policy in ("mixed_float16", "mixed_bfloat16", "float64")
    for case in PLAIN_CASES
    if (case.cls, policy) not in _WITHOUT_KERNEL
]


def compare(
    case: Case, policy: str, graph: bool, training: bool, choice: str | None = None
) -> None:
    with skipping_missing_kernels():
        stock = results(case, policy, None, graph, training)
    bitmap = results(case, policy, "bitmap", graph, training, choice)
    # What the codec does to a tensor does not depend on the choice to keep it.
    dense = bitmap if choice else results(case, policy, "dense", graph, training)
    assert bitmap.keys() == dense.keys() == stock.keys()
    bounds = {}
    if case.cls is keras.layers.BatchNormalization and training and case.trainable:
        bounds = batch_norm_bounds(Step(case, policy, None), stock["output"])
    if choice == REBUILD and case.attends and case.inputs == 0:
        bounds = self_attention_bounds(case, policy)
    for name, expected in stock.items():
        if expected is None:
            assert bitmap[name] is None, name
            assert dense[name] is None, name
            continue
        assert_same_bits(bitmap[name], dense[name], f"{name}, bitmap against dense")
        assert bitmap[name].dtype == expected.dtype
        difference = np.abs(np.float64(bitmap[name]) - np.float64(expected))
        same = (bitmap[name] == expected) | (np.isnan(bitmap[name]) & np.isnan(expected))
        difference[same] = 0  # infinities, and the norm of nothing in float16
        assert np.all(difference <= bounds.get(name, 0)), (name, difference.max())


def batch_norm_bounds(step: Step, y: np.ndarray) -> dict[str, np.ndarray]:
    """How far rounding can bring two ways to compute the gradients apart.

    Stock differentiates `x * s + (beta - mean * s)`, `s = gamma / sqrt(variance + epsilon)`,
    operation by operation; we sum the closed form

        dx = s * (dy - sum(dy) / n - x^ * sum(dy * x^) / n),   x^ = (x - mean) * s / gamma.

    Both are sums of products in which `x` and `mean` may come apart, so no intermediate
    value exceeds, and every rounding is at most eps times,

        |s| * (|dy| + sum|dy| / n + |x^| * sum(|dy| |x^|) / n),

    with `|x^|` standing for `(|x| + |mean|) * |s / gamma|`.

    A result is rounded at most `n` times in sums and 20 times elsewhere, in either way;
    under mixed precision, twice more in the narrow type. The factors' gradients are sums
    over the batch of `x` times that.
    """
    layer = step.layer
    (x,), (factor,) = step.xs, step.factors
    read = np.float64(to_numpy(step.front(x * factor)))
    dy = np.abs(np.float64(output_factor(y.shape)) * loss_weights(y.shape))
    axes = tuple(i for i in range(y.ndim) if i != layer.axis % y.ndim)
    n = read.size / read.shape[layer.axis]
    mean, variance = read.mean(axes, keepdims=True), read.var(axes, keepdims=True)
    gamma = 1.0 if layer.gamma is None else to_numpy(layer.gamma.value).reshape(mean.shape)
    inv_std = 1 / np.sqrt(variance + layer.epsilon)
    normal = (np.abs(read) + np.abs(mean)) * inv_std
    dgamma, dbeta = (dy * normal).sum(axes, keepdims=True), dy.sum(axes, keepdims=True)
    dx = np.abs(gamma) * inv_std * (dy + dbeta / n + normal * dgamma / n)

    widest = np.finfo(np.float64 if layer.compute_dtype == "float64" else np.float32).eps
    narrow = NARROW[layer.compute_dtype]
    eps = 2 * (n + 20) * widest + (2 * narrow if narrow > widest else 0)
    dinput, dfactor = dx * np.abs(to_numpy(factor)), (dx * np.abs(to_numpy(x))).sum(0)
    weights = [d for d, v in ((dgamma, layer.gamma), (dbeta, layer.beta)) if v is not None]
    bounds = {"gradient of input 0": dinput, "gradient of factor 0": dfactor}
    bounds |= {f"gradient of weight {i}": d.ravel() for i, d in enumerate(weights)}
    return {name: eps * bound for name, bound in bounds.items()}


def self_attention_bounds(case: Case, policy: str) -> dict[str, np.ndarray]:
    """How far the order of addition can bring two ways to compute the gradients apart.

    The gradient of the one input is the sum of those of query, key and value, `t1 + t2 + t3`.
    Tapes add them up in the order in which they arrive, which for stock depends on the
    operands of its products; rebuilt, they arrive together. The terms are the same bits: with
    several inputs, comparisons are exact.

    Either way rounds twice in that sum, once in the product with the factor (and once in the
    sum over a batch of two, for the factor's gradient), each time by at most eps times
    `|t1| + |t2| + |t3|`: four times in each way. The terms are had from stock, by giving it
    the one input as three.
    """
    step = Step(dataclasses.replace(case, inputs=3), policy, None)
    # Copies, to have a gradient of each.
    step.xs = [tf.identity(step.xs[0]) for _ in range(3)]
    step.factors = [tf.Variable(step.factors[0]) for _ in range(3)]
    found = step.run(training=True)
    terms = sum(np.abs(np.float64(found[f"gradient of input {i}"])) for i in range(3))
    factor, x = np.abs(to_numpy(step.factors[0])), np.abs(to_numpy(step.xs[0]))
    by_factor = np.divide(terms, factor, out=np.zeros_like(terms), where=factor > 0)
    eps = 8 * NARROW[step.layer.compute_dtype]
    return {
        "gradient of input 0": eps * terms,
        "gradient of factor 0": eps * (by_factor * x).sum(0),
    }


def test_every_registered_layer_has_a_case():
    assert {case.cls for case in CASES} == set(registered_layers())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option(case):
    compare(case, "float32", graph=False, training=True)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_in_a_graph(case):
    compare(case, "float32", graph=True, training=True)


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_graph(case):
    compare(case, "float32", graph=True, training=True)


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("choice", [KEEP, REBUILD])
@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_choice(case, choice):
    """In a graph: there, tensors that are rebuilt are shared between their readers."""
    compare(case, "float32", graph=True, training=True, choice=choice)


FREE_TO_CHOOSE = {
    *(layers.Dense, layers.Conv2D, layers.ReLU, layers.Dropout, layers.MaxPooling2D),
    *(layers.LeakyReLU, layers.PReLU, layers.LayerNormalization, layers.Multiply, layers.Add),
}


@pytest.mark.parametrize("case", [c for c in PLAIN_CASES if c.cls in FREE_TO_CHOOSE], ids=str)
def test_choice_is_followed(case):
    for choice, kinds in ((KEEP, recipes.Encoded | None), (REBUILD, recipes.Derived)):
        step = Step(case, "float32", "bitmap", choice)
        assert isinstance(recipes.of(step.run(training=True)["output"]), kinds)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("choice", [KEEP, REBUILD])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_choice_with_every_option(case, choice):
    compare(case, "float32", graph=True, training=True, choice=choice)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("choice", [KEEP, REBUILD])
@pytest.mark.parametrize(("case", "policy"), CASES_BY_POLICY, ids=str)
def test_choice_under_other_dtype_policies(case, policy, choice):
    compare(case, policy, graph=True, training=True, choice=choice)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_inference_mode(case):
    compare(case, "float32", graph=False, training=False)


@pytest.mark.parametrize(("case", "policy"), CASES_BY_POLICY, ids=str)
def test_other_dtype_policies(case, policy):
    compare(case, policy, graph=False, training=True)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize(("case", "policy"), CASES_BY_POLICY, ids=str)
def test_other_dtype_policies_in_a_graph(case, policy):
    compare(case, policy, graph=True, training=True)


@pytest.mark.parametrize("case", PLAIN_CASES, ids=str)
def test_optimized_graph(case):
    """With TensorFlow's rewriting: some roundings more or fewer, each of the largest value."""
    bitmap, stock = (results(case, "float32", codec, True, True) for codec in ("bitmap", None))
    for name, expected in stock.items():
        if expected is not None and expected.size:
            atol = 64 * np.finfo(np.float32).eps * float(np.abs(expected).max())
            np.testing.assert_allclose(bitmap[name], expected, rtol=0, atol=atol, err_msg=name)
