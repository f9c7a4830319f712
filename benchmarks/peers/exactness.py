"""How far training in one way ends from training in another: measured, and in words."""

import dataclasses
import math

import numpy as np

# Above this, the first update is another one; below, it was rounded otherwise.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A model at one point of its training.

    Attributes:
        weights: What is trained.
        statistics: Moving averages (BatchNormalization).
        loss: The mean loss up to there.
    """

    weights: list
    statistics: list
    loss: float | None


def snapshot(model, loss):
    statistics = [v for v in model.non_trainable_variables if "moving_" in v.path]
    return Snapshot(
        [np.array(v) for v in model.trainable_variables], [np.array(v) for v in statistics], loss
    )


def difference(start, stock, way, way_start):
    """What `way` came to against `stock`, both from `start`, in types that JSON has."""
    if not equal(start.weights, way_start.weights):
        raise RuntimeError("The weights to start from are not those of the stock model.")
    return {
        "weights": apart(start.weights, stock.weights, way.weights),
        "weights_moved": moved(start.weights, stock.weights, way.weights),
        "statistics": apart(start.statistics, stock.statistics, way.statistics),
        "statistics_moved": moved(start.statistics, stock.statistics, way.statistics),
        "loss": abs(way.loss - stock.loss) / abs(stock.loss),
    }


def equal(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def apart(start, stock, way):
    """The difference as a share of what training changed: 0 is the same bits, 1 all of it."""
    return 0.0 if equal(stock, way) else distance(stock, way) / (distance(start, stock) or 1.0)


def moved(start, stock, way):
    """How far `way` moved, as a ratio to how far `stock` did."""
    return distance(start, way) / distance(start, stock) if stock else 1.0


def distance(a, b):
    """Euclidean, of all tensors together."""
    return math.sqrt(
        sum(float(np.sum(np.square(np.float64(x) - y))) for x, y in zip(a, b, strict=True))
    )


def in_words(exactness):
    """For a cell of a table."""
    first, last, steps = exactness["first"], exactness["last"], exactness["steps"]
    figures = (
        f"first update {first['weights']:.0e}, after {steps} {last['weights']:.0e}, "
        f"loss {last['loss']:.0e}"
    )
    if last["weights"] == last["loss"] == 0:
        words = "bit-identical"
    elif first["weights"] < _ROUNDING:  # also false where it is not a number
        words = f"rounding ({figures})"
    else:
        words = f"**differs** ({figures})"
    if first["weights_moved"] == 0:
        words += "; the first update was left out"
    # To differ by what the weights before them do is no finding of its own.
    if first["statistics"] > max(_ROUNDING, 10 * first["weights"]) or (
        words == "bit-identical" and last["statistics"]
    ):
        words += f"; **moving statistics differ**, moved {first['statistics_moved']:.2f}x as far"
    return words
