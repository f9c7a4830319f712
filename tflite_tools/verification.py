"""Whether a file trains as Keras does, step by step, and what it takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bittrain_tf.analysis.text import size_text, table, to_text
from bittrain_tf.private import flatten_layers
from bittrain_tf.rewrite import classes_for_tracing, exported_classes
from tflite_tools import cost
from tflite_tools import flatbuffer as fb
from tflite_tools.graph import RANDOM, Graph
from tflite_tools.measurement import Measured, measure
from tflite_tools.trainer import Trainer
from tflite_tools.training import Training, transfer_shape

_EPS = float(np.finfo(np.float32).eps)
# Steps of Keras with other errors, at least and at most: which units an error switches is a matter
# of chance, so that more are tried before a difference counts as one.
_FEW, _MANY = 3, 32
_SIGNATURES = {"train", "evaluate", "infer", "get_weights", "set_weights", "reset"}

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one result is from the reference, where it is farthest for what it may be.

    Attributes:
        what: The result: `"loss"`, `"output"`, or a variable's name.
        step: After which step, counted from 1.
        difference: The largest of an element.
        tolerance: What rounding accounts for.
    """

    what: str
    step: int
    difference: float
    tolerance: float

    @property
    def ratio(self) -> float:
        """The difference in tolerances; at most 1 if it is rounding."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.tolerance if self.tolerance else math.inf


@dataclasses.dataclass(frozen=True)
class Verified:
    """What came of verifying a file.

    Attributes:
        path: The file.
        steps: How many steps were compared.
        worst: The largest difference of each kind of result, in tolerances, the worst first.
        custom: Operators in the file that are not builtin ones.
        missing: Signatures that it lacks.
        measured: What training takes with the default delegate and without; None if not measured.
    """

    path: pathlib.Path
    steps: int
    worst: tuple[Difference, ...]
    custom: tuple[str, ...]
    missing: tuple[str, ...]
    measured: dict[str, Measured] | None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.custom and not self.missing and all(d.ratio <= 1 for d in self.worst)

    def render(self) -> str:
        """All of it as text."""
        rows = [
            (d.what, str(d.step), f"{d.difference:.1e}", f"{d.tolerance:.1e}", f"{d.ratio:.2f}")
            for d in self.worst[:10]
        ]
        columns = ("result", "step", "difference", "tolerance", "ratio")
        verdict = "trains as Keras does" if self.ok else "DOES NOT train as Keras does"
        texts = [
            table(f"{self.path.name} {verdict}: {self.steps} steps", columns, rows, columns[1:])
        ]
        for what, names in (("operators", self.custom), ("signatures", self.missing)):
            if names:
                kind = "not builtin" if what == "operators" else "missing"
                texts.append(f"{what} {kind}: {', '.join(names)}\n")
        for name, m in (self.measured or {}).items():
            texts.append(f"{name}: peak {size_text(m.peak)}, {m.cpu * 1e3:.1f} ms CPU a step\n")
        return to_text(*texts)


def verify(
    path: str | os.PathLike[str],
    reference: keras.Model,
    *,
    steps: int = 5,
    data: Iterable[Sequence[Any]] | None = None,
    measured: bool = True,
) -> Verified:
    """Train a file in LiteRT and its model in Keras, and compare after each step.

    Each step starts from the same state in both, that of LiteRT before it, optimizer included.
    Compared are the loss, every variable and the output of inference. What they may differ by is
    measured: how far steps of Keras go apart whose variables, and what each layer takes (of a model
    within the model, what that takes), differ by the error that rounding makes in the longest sum
    in the file, eps times the square root of its number of terms (Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, section 2.8). So differences are found as large as rounding makes
    them where a unit is switched on or off by it, or where a sum is all but zero, and no larger.

    Args:
        path: A file that `export` wrote.
        reference: The model, compiled with the loss and the optimizer that were exported. It stays
            as it is: a copy is trained.
        steps: How many steps.
        data: Batches to train on, each `(inputs..., y)` or with sample weights after that; random
            numbers by default.
        measured: Whether to measure memory and time, too.

    Raises:
        FileFormatError: If `path` is not a whole `.tflite` file.
        ValueError: If `export` did not write it, if it is of another model, or if the reference is
            not compiled or draws random numbers, which no two runs have in common.
    """
    path = pathlib.Path(path)
    if not getattr(reference, "compiled", False):
        raise ValueError(
            "The reference model is not compiled. Compile it with the loss and the optimizer that "
            "it was exported with."
        )
    trainer = Trainer(path)
    file = fb.read(path)
    graphs = [Graph(file, number) for number in range(len(file.subgraphs))]
    if any(RANDOM & set(graph.names) for graph in graphs):
        raise ValueError(
            "The model draws random numbers when it trains (dropout, noise), so that no two runs "
            "can be compared. Verify it with these layers' rates at 0, exported the same way."
        )
    terms = max(cost.terms(graph, i) for graph in graphs for i in range(len(graph)))
    against = _Reference(reference, trainer, _EPS * math.sqrt(terms))
    found: dict[str, Difference] = {}
    batches = iter(data) if data is not None else None
    done = 0
    for step in range(1, steps + 1):
        batch = against.random_batch(step) if batches is None else next(batches, None)
        if batch is None:
            break
        done = step
        state = trainer.weights()
        loss = trainer.train_step(*batch)["loss"]
        results = {"loss": np.float32(loss), **trainer.weights()}
        results["output"] = trainer.infer(*batch[: against.inputs])
        for difference in against.differences(results, state, batch, step):
            name = difference.what
            if name not in found or difference.ratio > found[name].ratio:
                found[name] = difference
    names = {fb.text(s.signatureKey) for s in fb.listed(file.signatureDefs)}
    custom = {name for subgraph in file.subgraphs for name in fb.custom_names(file, subgraph)}
    ways = {"with the default delegate": True, "without delegate": False}
    return Verified(
        path,
        done,
        tuple(sorted(found.values(), key=lambda d: -d.ratio)),
        tuple(sorted(custom)),
        tuple(sorted(_SIGNATURES - names)),
        {name: measure(path, delegate=way) for name, way in ways.items()} if measured else None,
    )


class _Reference:
    """A copy of a model, and its steps, with rounding errors of a relative size or without."""

    def __init__(self, model: keras.Model, trainer: Trainer, error: float) -> None:
        optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
        self._manifest = trainer.manifest
        self._error = error
        self._rounding = _Rounding()
        # Not of the model itself: that would look for the class of its loss by name.
        inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
        # Pruned as the file is, at thresholds that do not change.
        with classes_for_tracing(model, exported_classes(model)):
            self._model = keras.models.clone_model(
                keras.Model(inputs, model.outputs), call_function=self._rounding.before
            )
        size = self._manifest["batch_size"]
        training = Training(self._model, model.loss, optimizer, {}, size, False)
        self.inputs = len(training.inputs)
        declared = self._manifest["variables"]
        # By their order: Keras counts the names of layers up from one model to the next.
        own = list(training.variables().values())
        shapes = [transfer_shape(v.shape) for v in own]
        if shapes != [v["shape"] for v in declared]:
            raise ValueError(
                "The file is of another model or optimizer: its variables have shapes "
                f"{[v['shape'] for v in declared]}, those of the reference {shapes}."
            )
        self._variables = {v["name"]: variable for v, variable in zip(declared, own, strict=True)}
        self._rate = self._manifest["learning_rate"]
        self._model.compile(optimizer, model.loss)

    def random_batch(self, seed: int) -> list[np.ndarray]:
        """Inputs and targets of the file's shapes."""
        rng = np.random.default_rng(seed)
        *specs, _ = self._manifest["signatures"]["train"]["inputs"]
        classes = self._model.output_shape[-1]
        return [
            rng.integers(0, classes if spec["name"] == "y" else 2, spec["shape"]).astype(np.int32)
            if spec["dtype"].startswith("int")
            else rng.random(spec["shape"], np.float32)
            for spec in specs
        ]

    def differences(
        self, results: Arrays, state: Arrays, batch: Sequence[Any], step: int
    ) -> list[Difference]:
        """What results of a step from `state` are off by, and may be."""
        expected = self.step(state, batch)
        spread = dict.fromkeys(results, 0.0)
        for seed in range(_MANY):
            self._rounding.error.assign(self._error)
            self._rounding.seed.assign(seed)
            other = self.step(_perturbed(state, self._error, seed), batch)
            self._rounding.error.assign(0.0)
            differences = []
            for name, value in results.items():
                spread[name] = max(spread[name], _distance(expected[name], other[name]))
                scale = float(np.max(np.abs(expected[name]), initial=0))
                # Either of the two may be off by as much.
                tolerance = 2 * spread[name] + self._error * scale
                difference = _distance(value, expected[name])
                differences.append(Difference(name, step, difference, tolerance))
            if seed + 1 >= _FEW and all(d.ratio <= 1 for d in differences):
                break
        return differences

    def step(self, state: Arrays, batch: Sequence[Any]) -> dict[str, np.ndarray]:
        """The loss, all variables and the output after one step from `state`."""
        for name, variable in self._variables.items():
            variable.assign(state[name].reshape(variable.shape))
        for layer in flatten_layers(self._model):
            if isinstance(layer, keras.layers.Normalization):
                layer.finalize_state()  # computes by copies of its variables
        self._model.optimizer.learning_rate = self._rate
        inputs, (y, *weights) = batch[: self.inputs], batch[self.inputs :]
        x = inputs[0] if self.inputs == 1 else list(inputs)
        loss = self._model.train_on_batch(x, y, sample_weight=weights[0] if weights else None)
        results = {
            name: v.numpy().reshape(transfer_shape(v.shape)) for name, v in self._variables.items()
        }
        output = self._model(x, training=False).numpy()
        return {"loss": np.float32(loss), **results, "output": output}


class _Rounding:
    """Errors in what layers take.

    Not in what they make: losses look at where the model's output comes from.

    Those of a channel are all up or all down: so its sum, as statistics of normalizations are, is
    off by the error of a sum, which is relative to the terms' absolute values.

    Attributes:
        error: Their relative size; none at 0.
        seed: Which of them are up, and which down.
    """

    def __init__(self) -> None:
        self.error = tf.Variable(0.0, trainable=False)
        self.seed = tf.Variable(0, trainable=False)
        self._count = itertools.count()

    def before(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the layer makes of its arguments with errors."""
        args, kwargs = keras.tree.map_structure(self._with_errors, (args, kwargs))
        return layer(*args, **kwargs)

    def _with_errors(self, x: Any) -> Any:
        if not keras.backend.is_keras_tensor(x) or not keras.backend.is_float_dtype(x.dtype):
            return x
        number = next(self._count)

        def disturb(x: tf.Tensor) -> tf.Tensor:
            bits = tf.random.stateless_uniform(
                tf.shape(x)[-1:], [self.seed, number], 0, 2, dtype=tf.int32
            )
            sign = tf.cast(2 * bits - 1, x.dtype)
            return x + tf.cast(self.error, x.dtype) * sign * tf.abs(x)

        return keras.layers.Lambda(disturb, lambda shape: shape, name=f"rounding_error_{number}")(x)


def _perturbed(state: Arrays, error: float, seed: int) -> dict[str, np.ndarray]:
    """Every element off by a relative error, up or down."""
    rng = np.random.default_rng(seed)
    return {
        name: (value * (1 + error * rng.choice([-1, 1], value.shape))).astype(value.dtype)
        if np.issubdtype(value.dtype, np.floating)
        else value
        for name, value in state.items()
    }


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    largest = float(np.max(difference, initial=0))
    return math.inf if math.isnan(largest) else largest
