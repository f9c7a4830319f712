"""Whole models train compressed as they do stock: same losses, same weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import small_models as small
from harness import to_numpy

import bittrain_tf as bt
from bittrain_tf.layers import KEEP, REBUILD, Rerun
from bittrain_tf.private import flatten_layers
from bittrain_tf.rewrite import compressed_classes, switch

pytestmark = pytest.mark.usefixtures("backend")

STEPS = 20
EPSILON = float(np.finfo(np.float32).eps)

# A GELU whose intermediates nobody keeps is fused with the product before it by TensorFlow's
# graph optimizer. Everything else runs the stock operations on the same bits forward,
ROUNDED_FORWARD = {"transformer"}
# and, but for batch normalization, which adds up its gradients in an order of its own, backward.
ROUNDED = ROUNDED_FORWARD | {"resnet", "mobilenet_v2", "densenet"}


def compiled(build, codec):
    """A compiled task, compressed unless `codec` is None."""
    task = small.seeded(build).compile()
    if codec is not None:
        bt.compress(task.model, codec=codec)
    return task


def trained(build, codec, steps=STEPS):
    """Losses and model after training from one seed; `codec` None for stock."""
    task = compiled(build, codec)
    return small.train(task.model, task.x, task.y, steps), task.model


def assert_close(stock, other, steps):
    """Equal but for the rounding of float32.

    A step rounds each weight (an epsilon of it) and adds the rounding of its gradient, some
    ten epsilons for sums of a few hundred terms, times rate / (1 - momentum) = 0.1: together
    at most two epsilons of the largest weight, which bounds what the next step inherits.
    """
    losses, model = stock
    other_losses, other_model = other
    tolerance = 2 * steps * EPSILON
    np.testing.assert_allclose(other_losses, losses, rtol=0, atol=tolerance * max(losses))
    scale = max(np.abs(w).max() for w in model.get_weights())
    for mine, theirs in zip(other_model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale)


def copy_state(source, target):
    for a, b in ((source, target), (source.optimizer, target.optimizer)):
        for mine, theirs in zip(b.variables, a.variables, strict=True):
            mine.assign(theirs)


@pytest.mark.parametrize("name", sorted(set(small.MODELS) - ROUNDED))
def test_trains_as_stock(name):
    build = small.MODELS[name]
    stock, bitmap, dense = (trained(build, codec) for codec in (None, "bitmap", "dense"))
    assert stock[0][-1] < stock[0][0]  # it does train
    for other in (bitmap, dense):
        assert other[0] == stock[0]
        assert small.weights(other[1]) == small.weights(stock[1])


@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_each_step_is_that_of_stock_but_for_rounding(name):
    """Step by step from the same state.

    Left to themselves, two trainings that differ in a last bit part in leaps, each time a
    rectifier or a maximum falls to the other side.
    """
    build = small.MODELS[name]
    stock, bitmap, dense = (compiled(build, codec) for codec in (None, "bitmap", "dense"))
    for step in range(STEPS):
        (loss,), (bitmap_loss,), (dense_loss,) = (
            small.train(task.model, task.x, task.y, 1) for task in (stock, bitmap, dense)
        )
        assert dense_loss == bitmap_loss
        assert small.weights(dense.model) == small.weights(bitmap.model)
        if name not in ROUNDED_FORWARD:
            assert bitmap_loss == loss, step
        assert_close(([loss], stock.model), ([bitmap_loss], bitmap.model), 1)
        copy_state(stock.model, bitmap.model)
        copy_state(stock.model, dense.model)


def test_random_layers_draw_once_a_step():
    """bert4keras#521, guided-diffusion#167: recomputed dropout that drew another mask."""
    steps = 50

    def generators(model):
        layers = [layer for layer in model.layers if hasattr(layer, "seed_generator")]
        return [layer.seed_generator.state.numpy() for layer in layers]

    before = generators(small.seeded(small.noisy).model)
    stock, bitmap = (trained(small.noisy, codec, steps) for codec in (None, "bitmap"))
    # assert_close compares the moving statistics too.
    assert_close(stock, bitmap, steps)
    assert len(before) == 3
    for first, theirs, ours in zip(
        before, generators(stock[1]), generators(bitmap[1]), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours - first, [0, steps])


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_moving_statistics_advance_once_a_step(run_eagerly):
    task = small.seeded(small.noisy)
    task.model.compile(keras.optimizers.SGD(0.0), task.loss, run_eagerly=run_eagerly)
    bt.compress(task.model)
    small.train(task.model, task.x, task.y, 2)
    convolution, normalization = task.model.layers[:2]
    mean = np.mean(convolution(task.x), (0, 1, 2))
    expected = mean * (1 - normalization.momentum**2)
    np.testing.assert_allclose(normalization.moving_mean, expected, rtol=1e-5, atol=1e-7)


def chosen(model, choice):
    """All outputs kept, or all rebuilt."""
    choices = dict.fromkeys(flatten_layers(model), choice)
    switch(model, compressed_classes(model, "bitmap", None, choices))


def rerun(model):
    bt.compress(model, filters=["block"])
    assert [layer.name for layer in flatten_layers(model) if isinstance(layer, Rerun)] == ["block"]


WAYS = {
    "as it sees fit": bt.compress,
    "all kept": lambda model: chosen(model, KEEP),
    "all rebuilt": lambda model: chosen(model, REBUILD),
    "a block re-run": rerun,
}


def seeds(model):
    return [v.value.numpy().tolist() for v in model.variables if "seed" in v.path]


# `filters` has tests of its own, in test_rerun.py.
SOME = [pytest.param(way, marks=() if "all" in way else pytest.mark.slow) for way in WAYS]


@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("way", SOME)
def test_every_choice_trains_as_stock(way):
    """50 steps: the same losses, metrics, weights, optimizer and seeds, bit for bit."""

    def run(change):
        task = small.seeded(lambda: small.mixture(normalized=False)).compile(metrics=["accuracy"])
        change(task.model)
        before = seeds(task.model)
        x, y = np.tile(task.x, (2, 1, 1, 1)), np.tile(task.y, 2)
        history = task.model.fit(x, y, 4, epochs=25, shuffle=False, verbose=0).history
        drawn = np.subtract(seeds(task.model), before)
        return history, small.bits(v.value for v in task.model.variables), drawn, task.model

    history, variables, drawn, _ = run(lambda model: None)
    other = run(WAYS[way])
    assert other[0] == history
    assert other[1] == variables
    np.testing.assert_array_equal(other[2], drawn)
    np.testing.assert_array_equal(drawn, [[0, 50]] * 3)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_graphs")
@pytest.mark.parametrize("way", WAYS)
def test_every_choice_with_batch_normalization(way):
    """Step by step from the same state; see `test_each_step_is_that_of_stock_but_for_rounding`."""
    stock, other = (small.seeded(small.mixture).compile() for _ in range(2))
    WAYS[way](other.model)
    for _ in range(50):
        (loss,), (other_loss,) = (
            small.train(task.model, task.x, task.y, 1) for task in (stock, other)
        )
        assert other_loss == loss
        assert seeds(other.model) == seeds(stock.model)
        statistics = [
            [to_numpy(v) for v in task.model.get_layer("normalization").non_trainable_variables]
            for task in (stock, other)
        ]
        np.testing.assert_array_equal(*statistics)
        assert_close(([loss], stock.model), ([other_loss], other.model), 1)
        copy_state(stock.model, other.model)
