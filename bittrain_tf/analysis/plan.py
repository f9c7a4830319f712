"""`plan`: which layers' outputs are kept and which rebuilt, so that a budget is met."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from bittrain_tf import allocator, ledger, planning, recipes
from bittrain_tf.analysis.cost import operations_seconds
from bittrain_tf.analysis.graph import needed
from bittrain_tf.analysis.liveness import Densities, original, peak_live_bytes
from bittrain_tf.analysis.problem import read_problem
from bittrain_tf.analysis.text import size_text, table, to_text
from bittrain_tf.analysis.tracing import TracedStep, batch_tensors, check_batch, trace
from bittrain_tf.codecs import get_codec
from bittrain_tf.layers import KEEP, REBUILD, stock_class
from bittrain_tf.planning import Point, Problem
from bittrain_tf.private import flatten_layers
from bittrain_tf.recipes import Encoded
from bittrain_tf.rewrite import Filters, check_model, classes_for_tracing, compressed_classes

if TYPE_CHECKING:
    from rich.console import Group

_BATCH_SIZE = 32
_DENSITY = 0.5
_TRIES = 3
# A plan whose peak is predicted this far below the budget may well be slower than need be.
_TIGHT = 0.95
# Plans to choose from by tracing them are so much apart in peak.
_APART = 1.1

Classes = Mapping[keras.layers.Layer, type]


@dataclasses.dataclass(frozen=True)
class PlannedLayer:
    """What becomes of the output of a layer.

    Attributes:
        name: Name of the layer; numbered where several have the same.
        class_name: Its Keras class.
        choice: `"keep"` or `"rebuild"`.
        codec: How it is kept: the codec, or `"dense"` for what no codec makes smaller; None
            if it is rebuilt.
        nbytes: Bytes of the tensors in question.
        kept_bytes: Bytes that are kept of them.
    """

    name: str
    class_name: str
    choice: str
    codec: str | None
    nbytes: int
    kept_bytes: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is kept and what is rebuilt, and what that is predicted to take.

    Peaks are of live bytes above the resident model, of one step at the batch size
    planned for. Times are those of a model of floating-point operations and bytes
    moved (see `analysis/cost.py`): good for comparing plans, not for the clock.

    Attributes:
        model: Name of the model.
        stock_peak: Predicted peak of the stock model.
        stock_seconds: Predicted seconds of a step of the stock model.
        peak: Predicted peak of the plan.
        time_ratio: Predicted time of a step as a ratio to the stock model's.
        layers: A row for each layer there was a choice for.
        points: Peak and time ratio of other plans, of which none is beaten in both by
            another; the quickest first.
        choices: `"keep"` or `"rebuild"` by layer, as `compress` puts it on.
    """

    model: str
    stock_peak: int
    stock_seconds: float
    peak: int
    time_ratio: float
    layers: tuple[PlannedLayer, ...]
    points: tuple[tuple[int, float], ...]
    choices: Mapping[keras.layers.Layer, str] = dataclasses.field(repr=False)

    @property
    def peak_ratio(self) -> float:
        """Predicted peak as a ratio to the stock model's."""
        return self.peak / self.stock_peak

    @property
    def quicker(self) -> tuple[int, float] | None:
        """Of `points`, the smallest one noticeably quicker; None if there is none."""
        return min((p for p in self.points if p[1] <= 0.97 * self.time_ratio), default=None)

    @property
    def smaller(self) -> tuple[int, float] | None:
        """Of `points`, the quickest one noticeably smaller; None if there is none."""
        smaller = (p for p in self.points if p[0] <= 0.9 * self.peak)
        return min(smaller, key=lambda p: p[1], default=None)

    def render(self) -> str:
        """The plan, as text."""
        return to_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the layer objects, in types that JSON has."""
        return {
            "model": self.model,
            "stock_peak": self.stock_peak,
            "stock_seconds": self.stock_seconds,
            "peak": self.peak,
            "peak_ratio": self.peak_ratio,
            "time_ratio": self.time_ratio,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "points": [{"peak": peak, "time_ratio": ratio} for peak, ratio in self.points],
        }

    def __rich__(self) -> Group:
        """What rich prints."""
        from rich.console import Group

        layers = table(
            f"Plan for {self.model}",
            ["layer", "class", "output", "codec", "dense", "kept"],
            (
                (
                    row.name,
                    row.class_name,
                    row.choice,
                    row.codec or "",
                    size_text(row.nbytes),
                    size_text(row.kept_bytes) if row.choice == KEEP else "",
                )
                for row in self.layers
            ),
            numeric=["dense", "kept"],
        )
        named = {
            "stock": (self.stock_peak, 1.0),
            "next quicker": self.quicker,
            "this plan": (self.peak, self.time_ratio),
            "next smaller": self.smaller,
        }
        summary = table(
            "Predicted for a step, above the resident model",
            ["", "peak", "of stock", "time, of stock"],
            (
                (name, size_text(p[0]), f"{p[0] / self.stock_peak:.2f}", f"{p[1]:.2f}")
                for name, p in named.items()
                if p is not None
            ),
            numeric=["peak", "of stock", "time, of stock"],
        )
        return Group(layers, summary)


def plan(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    memory_budget: float | int | None = None,
    time_budget: float | None = None,
    codec: str = "bitmap",
    filters: Filters | None = None,
) -> Plan:
    """Plan what `compress` with the same arguments does; the model stays what it is.

    With a memory budget, the quickest plan that meets it. With a time budget, the plan
    of the lowest peak that meets it. With both, the quickest that meets the first, if it
    meets the second. With neither, the lowest peak in the time of the stock model, or
    the quickest plan.

    Args:
        model: A built Keras model, compressed or not, compiled or not.
        x: One batch of inputs; run forward once, for the densities. By default a batch of
            32 samples of the shapes the model was built for, with half of the values zero.
        y: The targets of the batch, for the loss that the model is compiled with.
        memory_budget: See `compress`.
        time_budget: See `compress`.
        codec: See `compress`.
        filters: See `compress`.

    Returns:
        The plan; see `Plan`.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the model is not built, the batch does not fit it or is needed and
            not given, an argument is out of range, or a budget cannot be met; then with
            the lowest that can.
    """
    check_model(model)
    get_codec(codec)
    check_budgets(memory_budget, time_budget)
    is_bytes = isinstance(memory_budget, int)
    try:
        planner = _Planner(model, _batch(model, x, y, is_bytes), codec, filters)
        if memory_budget is not None:
            allowed = memory_budget if is_bytes else int(memory_budget * planner.stock_peak)
            point, peak = planner.within_bytes(allowed)
        else:
            point, peak = planner.within_time(time_budget)
        return planner.plan(point, peak, time_budget)
    finally:
        # The traces are garbage now, 50 MB each of a large model; the step is to have that.
        allocator.return_freed()


class _Planner:
    """The plans of one model and batch."""

    def __init__(
        self, model: keras.Model, batch: tuple[Any, Any], codec: str, filters: Filters | None
    ) -> None:
        self._model, self._batch = model, batch
        self._codec, self._filters = codec, filters
        self._labels = _labels(flatten_layers(model))
        self._densities = Densities(_DENSITY)
        stock = {layer: stock_class(layer) for layer in self._labels}
        self.stock_peak, self._stock_seconds = self._cost(stock)
        if not self.stock_peak:
            raise ValueError(
                f"Model {model.name!r} has nothing to plan: a training step of it computes no "
                "gradient. Are all of its layers frozen?"
            )
        self._problem = self._read_problem()
        self._points = planning.frontier(self._problem)

    def within_bytes(self, allowed: int) -> tuple[Point, int]:
        """The quickest plan, and its peak."""
        target, best = allowed, None
        for _ in range(_TRIES):
            point = planning.cheapest(self._problem, self._points, target)
            if point is None or (best is not None and point == best[0]):
                break
            peak = self._peak(point)
            if peak <= allowed and (best is None or point.seconds < best[0].seconds):
                best = point, peak
            if _TIGHT * allowed <= peak <= allowed:
                break
            target = int(target * allowed / peak) if peak else allowed
        if best is not None:
            return best
        lowest, peak = self._smallest(math.inf)
        if peak > allowed:
            raise ValueError(
                f"memory_budget is {size_text(allowed)}, {allowed / self.stock_peak:.3g} of the "
                f"stock model's peak. The lowest that can be reached is {size_text(peak)}"
                + (
                    f", memory_budget={_rounded_up(peak / self.stock_peak)}."
                    if peak < self.stock_peak
                    else ": no less than stock's; this model, or batch, gains nothing."
                )
            )
        return lowest, peak

    def within_time(self, ratio: float | None) -> tuple[Point, int]:
        """The plan of the lowest peak, and that peak."""
        found = self._smallest((1.0 if ratio is None else ratio) * self._stock_seconds)
        if found is not None:
            return found
        quickest = self._points[0]
        if ratio is not None:
            lowest = quickest.seconds / self._stock_seconds
            raise ValueError(
                f"time_budget is {ratio:g} times the stock model's time. The quickest plan "
                f"is predicted to take {_rounded_up(lowest)}."
            )
        return quickest, self._peak(quickest)

    def _smallest(self, seconds: float) -> tuple[Point, int] | None:
        """The plan of the lowest peak within a time, and that peak; None if there is none."""
        point = planning.smallest(self._problem, self._points, seconds)
        if point is None:
            return None
        best, tried = (point, self._peak(point)), 1
        for other in reversed(self._points):
            # What plans come to as they are traced is not quite what they were evaluated to; but
            # a trace takes seconds, so only of what may be smaller than the smallest so far.
            differs = other.peak_bytes >= _APART * point.peak_bytes
            if differs and other.seconds <= seconds and other.peak_bytes < best[1]:
                if tried == _TRIES:
                    break
                best = min(best, (other, self._peak(other)), key=lambda found: found[1])
                point, tried = other, tried + 1
        return best

    def plan(self, point: Point, peak: int, time_budget: float | None) -> Plan:
        """The plan of a point."""
        ratio = point.seconds / self._stock_seconds
        if time_budget is not None and ratio > time_budget:
            raise ValueError(
                f"The quickest plan within memory_budget is predicted to take {_rounded_up(ratio)} "
                f"times the stock model's time, time_budget allows {time_budget:g}. Raise either."
            )
        choices, groups = self._choices(point), set(self._problem.groups)
        rows = tuple(
            self._row(layer, choices[layer])
            for layer, name in self._labels.items()
            if name in groups
        )
        points = tuple((p.peak_bytes, p.seconds / self._stock_seconds) for p in self._points)
        return Plan(
            self._model.name,
            self.stock_peak,
            self._stock_seconds,
            peak,
            ratio,
            rows,
            points,
            choices,
        )

    def _row(self, layer: keras.layers.Layer, choice: str) -> PlannedLayer:
        name = self._labels[layer]
        tensors = [t for t in self._problem.tensors if t.group == name]
        is_encoded = any(t.kept_seconds for t in tensors)
        return PlannedLayer(
            name,
            stock_class(layer).__name__,
            choice,
            None if choice == REBUILD else self._codec if is_encoded else "dense",
            sum(t.nbytes for t in tensors),
            sum(t.kept_bytes for t in tensors) if choice == KEEP else 0,
        )

    def _choices(self, point: Point) -> dict[keras.layers.Layer, str]:
        return {
            layer: REBUILD if name in point.rebuilt else KEEP
            for layer, name in self._labels.items()
        }

    def _peak(self, point: Point) -> int:
        classes = compressed_classes(self._model, self._codec, self._filters, self._choices(point))
        return self._cost(classes)[0]

    def _read_problem(self) -> Problem:
        """The problem; with the densities of the batch, if that is one of arrays."""
        keep = dict.fromkeys(self._labels, KEEP)
        classes = compressed_classes(self._model, self._codec, self._filters, keep)
        groups = {id(layer): name for layer, name in self._labels.items()}
        found: list[Any] = []

        @tf.function(autograph=False)
        def step(x: Any, y: Any) -> tf.Tensor:
            with ledger.opened() as entries:
                traced = trace(self._model, x, y, None)
            encoded = _encoded(entries)
            found[:] = [traced, entries, list(encoded)]
            return tf.stack([tf.zeros([]), *map(_density, encoded.values())])

        with classes_for_tracing(self._model, classes):
            concrete = step.get_concrete_function(*self._batch)
        traced, entries, names = found
        if not _is_spec(self._batch):
            _, *shares = concrete(*self._batch).numpy().tolist()
            self._densities = Densities(_DENSITY, dict(zip(names, shares, strict=True)))
        with traced.graph.as_default():
            return read_problem(traced, entries, groups, self._densities)

    def _cost(self, classes: Classes) -> tuple[int, float]:
        """The peak of live bytes and the seconds of a step with these classes."""
        with classes_for_tracing(self._model, classes):
            return _cost(self._model, self._batch, self._densities)


def predicted_cost(model: keras.Model, x: Any, y: Any = None) -> tuple[int, float]:
    """What a step of `model`, as it is, is predicted to take, whatever makes it save memory.

    Args:
        model: A built Keras model.
        x: One batch of inputs.
        y: The targets of the batch.

    Returns:
        The peak of live bytes above the resident model, and seconds: to be compared with
        those of other steps, see `Plan`.
    """
    return _cost(model, _batch(model, x, y, False), Densities(_DENSITY))


def _cost(model: keras.Model, batch: tuple[Any, Any], densities: Densities) -> tuple[int, float]:
    found: list[TracedStep] = []

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        found[:] = [trace(model, x, y, None)]

    step.get_concrete_function(*batch)
    graph, gradients = found[0].graph, found[0].gradients
    seconds = operations_seconds(needed(graph, gradients), densities)
    return peak_live_bytes(graph, gradients, densities), seconds


def _labels(layers: Sequence[keras.layers.Layer]) -> dict[keras.layers.Layer, str]:
    """A name of its own for each layer."""
    seen: Counter[str] = Counter()
    labels = {}
    for layer in layers:
        seen[layer.name] += 1
        count = seen[layer.name]
        labels[layer] = layer.name if count == 1 else f"{layer.name} ({count})"
    return labels


def _encoded(entries: ledger.Ledger) -> dict[str, tf.Tensor]:
    """The tensors that are encoded, by the operation that makes them."""
    return {
        original(x).op.name: x
        for x in entries.tensors.values()
        if isinstance(recipes.of(x), Encoded)
    }


def _density(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.cast(tf.not_equal(x, 0), tf.float32))


def _batch(model: keras.Model, x: Any, y: Any, is_bytes: bool) -> tuple[Any, Any]:
    """The batch to plan for, as tensors, or as specifications of tensors."""
    if x is not None:
        x, y = batch_tensors("x", x), batch_tensors("y", y)
        check_batch(model, x, y)
        return x, y
    inputs = getattr(model, "inputs", None)
    unknown = not inputs or any(None in t.shape[1:] for t in inputs)
    if unknown or (is_bytes and inputs[0].shape[0] is None):
        reason = (
            "the shapes of its inputs are not known in advance"
            if unknown
            else "a budget in bytes depends on the batch size"
        )
        raise ValueError(f"Planning for model {model.name!r} needs a sample batch: {reason}.")

    def specification(t: keras.KerasTensor) -> tf.TensorSpec:
        return tf.TensorSpec((t.shape[0] or _BATCH_SIZE, *t.shape[1:]), t.dtype)

    specifications = [specification(t) for t in inputs]
    return specifications[0] if len(specifications) == 1 else specifications, None


def _is_spec(batch: tuple[Any, Any]) -> bool:
    return any(isinstance(t, tf.TensorSpec) for t in keras.tree.flatten(batch[0]))


def check_budgets(memory_budget: float | int | None, time_budget: float | None) -> None:
    """Raise a `ValueError` for a budget that cannot be one."""
    if memory_budget is not None:
        is_share = isinstance(memory_budget, float) and 0 < memory_budget <= 1
        is_bytes = (
            isinstance(memory_budget, int)
            and not isinstance(memory_budget, bool)
            and memory_budget > 0
        )
        if not (is_share or is_bytes):
            raise ValueError(
                "memory_budget must be a float in (0, 1], a share of what the stock model takes, "
                f"or a positive int, bytes; got {memory_budget!r}."
            )
    is_number = isinstance(time_budget, int | float) and not isinstance(time_budget, bool)
    if time_budget is not None and not (is_number and time_budget >= 1):
        raise ValueError(
            "time_budget is the step time allowed as a ratio to the stock model's, 1 or more; "
            f"got {time_budget!r}."
        )


def _rounded_up(ratio: float) -> float:
    return math.ceil(ratio * 1000) / 1000
