"""Training a file in LiteRT from Python: what an app on a phone does with the same signatures."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from tflite_tools import flatbuffer as fb
from tflite_tools import manifest
from tflite_tools.files import refuse_to_overwrite, write_whole

Batch = tuple[Any, ...]
_NOTHING = np.zeros(1, np.float32)


class Trainer:
    """Runs the signatures of a file that `tflite_tools.export` wrote.

    Args:
        path: The file.
        num_threads: For the interpreter; by default, as many as it sees fit.
        delegate: Whether the interpreter may use its default delegate (XNNPACK).

    Attributes:
        manifest: What the file says of itself.

    Raises:
        FileFormatError: If it is not a whole `.tflite` file.
        ValueError: If it is one that `export` did not write.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int | None = None,
        delegate: bool = True,
    ) -> None:
        path = pathlib.Path(path)
        # Looked through first: of a corrupted file the interpreter can die, and Python with it.
        self.manifest = manifest.of(path)
        resolver = (
            OpResolverType.AUTO if delegate else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        )
        try:
            self._interpreter = Interpreter(
                str(path), num_threads=num_threads, experimental_op_resolver_type=resolver
            )
        except ValueError as error:
            raise fb.FileFormatError(
                f"LiteRT does not take {path}: {error}. Export it again, or copy it again from "
                "where it was made."
            ) from error
        self._runners: dict[str, Any] = {}

    def train_step(self, *batch: Any, learning_rate: float | None = None) -> dict[str, float]:
        """One step on one batch.

        Args:
            *batch: The inputs, the targets and, if the file takes them, the sample weights.
            learning_rate: Of this step; by default, that of the optimizer that was exported.

        Returns:
            The loss and the metrics before the step.

        Raises:
            ValueError: If an array has not the shape or the dtype that the file declares.
        """
        rate = self.manifest["learning_rate"] if learning_rate is None else learning_rate
        return _numbers(self._run("train", [*batch, np.float32(rate)]))

    def evaluate(self, *batch: Any) -> dict[str, float]:
        """The loss and the metrics of one batch, which is as in `train_step`."""
        return _numbers(self._run("evaluate", batch))

    def infer(self, *inputs: Any) -> np.ndarray:
        """The model's output for as many samples as there are, in batches of the file's size."""
        count = len(inputs[0])
        size = self.manifest["batch_size"]
        outputs = []
        for start in range(0, count, size):
            parts = [np.asarray(x)[start : start + size] for x in inputs]
            missing = size - len(parts[0])
            if missing:  # the rest of the last batch is any samples
                parts = [np.concatenate([x, np.repeat(x[-1:], missing, 0)]) for x in parts]
            outputs.append(self._run("infer", parts)["output"][: size - missing].copy())
        return np.concatenate(outputs)

    def fit(
        self,
        dataset: Iterable[Batch],
        *,
        epochs: int = 1,
        learning_rate: float | None = None,
        progress: bool = True,
    ) -> dict[str, list[float]]:
        """Train on a data set.

        Args:
            dataset: What gives batches, anew in each epoch: a list, a `tf.data.Dataset` or
                any other iterable that is not used up.
            epochs: How often to go through it.
            learning_rate: See `train_step`.
            progress: Whether to draw a progress bar.

        Returns:
            The means of the loss and the metrics, by epoch.
        """
        from rich.progress import Progress  # here, since no device has it

        history: dict[str, list[float]] = {}
        with Progress(disable=not progress) as bar:
            for epoch in range(epochs):
                task = bar.add_task(f"epoch {epoch + 1}/{epochs}", total=_length(dataset))
                steps = []
                for batch in dataset:
                    steps.append(self.train_step(*batch, learning_rate=learning_rate))
                    bar.update(task, advance=1, description=_line(epoch, epochs, steps[-1]))
                if not steps:
                    raise ValueError(
                        f"The data set gave no batch in epoch {epoch + 1}. Pass one that can be "
                        "gone through again: a list or a tf.data.Dataset, not a generator."
                    )
                for name in steps[0]:
                    mean = float(np.mean([step[name] for step in steps]))
                    history.setdefault(name, []).append(mean)
        return history

    def weights(self) -> dict[str, np.ndarray]:
        """A copy of every variable by name, in the manifest's order."""
        found = self._runner("get_weights")(nothing=_NOTHING)
        return {v["name"]: np.array(found[v["name"]]) for v in self.manifest["variables"]}

    def set_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Assign every variable.

        Raises:
            ValueError: If one is missing, or unknown, or has another shape or dtype. Nothing
                is assigned then.
        """
        declared = {v["name"]: v for v in self.manifest["variables"]}
        missing, unknown = declared.keys() - weights.keys(), weights.keys() - declared.keys()
        if missing or unknown:
            raise ValueError(
                f"These are not the variables of the file: missing {sorted(missing)}, "
                f"unknown {sorted(unknown)}. weights() gives those it has."
            )
        arrays = {name: _checked(weights[name], spec) for name, spec in declared.items()}
        self._runner("set_weights")(**arrays)

    def reset(self) -> None:
        """Set everything back to what it was when the file was written."""
        self._runner("reset")(nothing=_NOTHING)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write every variable to a `.safetensors` file, whole or not at all.

        Raises:
            FileExistsError: If there is one and `overwrite` is False.
        """
        from safetensors.numpy import save

        path = pathlib.Path(path)
        refuse_to_overwrite(path, overwrite)
        about = {"model": self.manifest["model"]["sha256"]}
        write_whole(path, save(self.weights(), metadata=about))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Assign what `save` wrote.

        Raises:
            FileFormatError: If the file is not one of these, or not a whole one.
            ValueError: If it is of another model.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            weights = load(pathlib.Path(path).read_bytes())
        except SafetensorError as error:
            raise fb.FileFormatError(
                f"{path} is not a whole .safetensors file: {error}. Give one that save() wrote."
            ) from error
        self.set_weights(weights)

    def _run(self, signature: str, arrays: Iterable[Any]) -> dict[str, np.ndarray]:
        specs = self.manifest["signatures"][signature]["inputs"]
        arrays = list(arrays)
        if len(arrays) != len(specs):
            raise ValueError(
                f"{signature} takes {', '.join(spec['name'] for spec in specs)}: "
                f"{len(specs)} arrays, not {len(arrays)}."
            )
        given = {s["name"]: _checked(x, s) for x, s in zip(arrays, specs, strict=True)}
        return self._runner(signature)(**given)

    def _runner(self, signature: str) -> Any:
        if signature not in self._runners:
            self._runners[signature] = self._interpreter.get_signature_runner(signature)
        return self._runners[signature]


def _checked(value: Any, spec: Mapping[str, Any]) -> np.ndarray:
    """`value` as the array that is declared: a wrong one can take the interpreter down."""
    array = np.asarray(value)
    if list(array.shape) != spec["shape"]:
        raise ValueError(
            f"{spec['name']} has shape {list(array.shape)}; it must be {spec['shape']}."
        )
    if array.dtype != spec["dtype"]:
        if not np.can_cast(array.dtype, spec["dtype"], "same_kind"):
            raise ValueError(f"{spec['name']} is {array.dtype}; it must be {spec['dtype']}.")
        array = array.astype(spec["dtype"])
    return np.asarray(array, order="C")  # np.ascontiguousarray would make a vector of a number


def _numbers(results: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(value) for name, value in results.items()}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _line(epoch: int, epochs: int, results: Mapping[str, float]) -> str:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
    return f"epoch {epoch + 1}/{epochs}, {figures}"
