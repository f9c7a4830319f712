"""Which model is investigated, and on which data."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from typing import Any

import keras
import numpy as np

from bittrain_tf.analysis.builder import application, build, call, check_name
from bittrain_tf.analysis.tracing import batch_tensors, check_batch

_BATCHES = 4  # of random images: an epoch is then a few steps
_HOW = "Save it with numpy.savez(FILE, x=inputs, y=targets), samples along the first axis."


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and data to train it on.

    Attributes:
        model: The model, compiled.
        x: Inputs.
        y: Targets.
        is_random: Whether the data are random numbers.
    """

    model: keras.Model
    x: Any
    y: Any
    is_random: bool


def subject(
    name: str, data: str | os.PathLike[str] | None, *, batch_size: int, image_size: int, seed: int
) -> Subject:
    """The model of a name and the data of a file, or of the function that builds the model.

    Args:
        name: As of `builder.build`. A model of `keras.applications` is built for the size
            and the classes of the images in the file; without one, for random images of
            10 classes.
        data: A `.npz` file with arrays `x` and `y`.
        batch_size: Samples of the largest batch, for random images.
        image_size: Height and width of random images.
        seed: Seed of the weights, of random images and of training.

    Raises:
        ValueError: If there is no such model, the file cannot be used, or its data do not
            fit the model.
    """
    check_name(name)
    arrays = None if data is None else read(data)
    keras.utils.set_random_seed(seed)
    if ":" in name:
        model, x, y = call(name)
        if arrays is not None:
            x, y = arrays
            _check_fits(model, x, y, data)
        return Subject(model, x, y, is_random=False)
    if arrays is not None:
        x, y = arrays
        return Subject(_application_for(name, x, y, data), x, y, is_random=False)
    model, x, y = build(
        name, batch_size=batch_size, image_size=image_size, seed=seed, batches=_BATCHES
    )
    return Subject(model, x, y, is_random=True)


def read(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """The arrays `x` and `y` of a `.npz` file.

    Raises:
        ValueError: If there is no such file, it is of another kind, or lacks an array; or
            the arrays are empty, of different lengths, or hold no numbers.
    """
    name = os.fspath(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise ValueError(f"There is no file {name!r} to read x and y from.") from None
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        # A .npy file loads as an array, which is no context manager.
        raise ValueError(f"{name!r} is no .npz file of arrays x and y ({error}). {_HOW}") from None
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        raise ValueError(
            f"{name!r} has no array {' and no '.join(missing)}; it holds {sorted(arrays)}. {_HOW}"
        )
    x, y = arrays["x"], arrays["y"]
    for key in ("x", "y"):
        array = arrays[key]
        if not array.ndim or not len(array) or array.dtype.kind not in "biuf":
            raise ValueError(
                f"{key} in {name!r} must be an array of numbers, samples along its first axis; "
                f"got shape {array.shape} of {array.dtype}. {_HOW}"
            )
    if len(x) != len(y):
        raise ValueError(
            f"x and y in {name!r} hold different numbers of samples: shapes {x.shape} and "
            f"{y.shape}. Each sample of x needs one of y."
        )
    return x, y


def _application_for(name: str, x: np.ndarray, y: np.ndarray, path: Any) -> keras.Model:
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise ValueError(
            f"x in {os.fspath(path)!r} has shape {x.shape}; {name} takes images, shape (samples, "
            "height, width, channels), of 1 or 3 channels. Reshape them, or give a model of "
            "your own as 'package.module:function'."
        )
    loss = "sparse_categorical_crossentropy"
    if y.ndim == 2 and y.shape[1] > 1:
        loss, classes = "categorical_crossentropy", y.shape[1]
    elif y.size == len(y) and np.array_equal(y, np.floor(y)) and y.min() >= 0:
        classes = int(y.max()) + 1
    else:
        raise ValueError(
            f"y in {os.fspath(path)!r} has shape {y.shape} of {y.dtype}, values from {y.min():g} "
            f"to {y.max():g}; {name} is trained to tell classes apart: give a whole number "
            "from 0 on for each sample, or a row of a number for each class."
        )
    try:
        return application(name, x.shape[1:], classes, loss)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be built for x in {os.fspath(path)!r} of shape {x.shape}: {error}"
        ) from None


def _check_fits(model: keras.Model, x: np.ndarray, y: np.ndarray, path: Any) -> None:
    try:
        check_batch(model, batch_tensors("x", x[:1]), batch_tensors("y", y[:1]))
    except ValueError as error:
        raise ValueError(f"The data of {os.fspath(path)!r} do not fit. {error}") from None
    loss = getattr(model, "loss", None)
    is_sparse = loss == "sparse_categorical_crossentropy" or isinstance(
        loss, keras.losses.SparseCategoricalCrossentropy
    )
    outputs = getattr(model, "outputs", None) or ()
    classes = outputs[0].shape[-1] if len(outputs) == 1 and is_sparse else None
    if classes is not None and not (y.min() >= 0 and y.max() < classes):
        raise ValueError(
            f"The data of {os.fspath(path)!r} do not fit. Model {model.name!r} tells {classes} "
            f"classes apart, y must be from 0 to {classes - 1}; got values from {y.min():g} to "
            f"{y.max():g}."
        )
