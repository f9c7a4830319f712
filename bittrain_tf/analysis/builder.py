"""Models named by a text, for commands and child processes."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np


def check_name(name: str) -> None:
    """Check how `name` is spelt, before anything is imported for it.

    Args:
        name: `"package.module:function"`, or a model of `keras.applications`.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(name, str):
        raise ValueError(
            "The model is named by a text, as it is built in processes of its own: "
            f"'package.module:function' or a model of keras.applications; got {name!r}."
        )
    if ":" in name:
        module, _, function = name.partition(":")
        if not function.isidentifier() or not all(p.isidentifier() for p in module.split(".")):
            raise ValueError(
                f"{name!r} does not name a function; write it as 'package.module:function'."
            )
    elif name not in application_names():
        raise ValueError(
            f"{name!r} is no model of keras.applications.{_suggest(name, application_names())} "
            "A model of your own is given as 'package.module:function'."
        )


def application_names() -> list[str]:
    """The models of `keras.applications`."""
    return [name for name in dir(keras.applications) if name[0].isupper()]


def build(
    name: str, *, batch_size: int, image_size: int, seed: int, batches: int
) -> tuple[keras.Model, Any, Any]:
    """The model of a name, compiled, and data to train it on.

    Args:
        name: A model of `keras.applications`, which gets random weights, images and
            labels of 10 classes; or `"package.module:function"`, a function that returns
            `(compiled model, x, y)`.
        batch_size: Samples in a batch.
        image_size: Height and width of the images, for `keras.applications`.
        seed: Seed of the weights and the data.
        batches: How many batches of data.

    Returns:
        The model, and inputs and targets of `batches * batch_size` samples; what a
        function returns is cut or repeated to that length.

    Raises:
        ValueError: If there is no such model, or the function does not return one.
    """
    check_name(name)
    keras.utils.set_random_seed(seed)
    count = batches * batch_size
    if ":" in name:
        model, x, y = call(name)
    else:
        model = application(name, (image_size, image_size, 3), classes=10)
        rng = np.random.default_rng(seed)
        x = rng.random((count, image_size, image_size, 3), dtype=np.float32)
        y = rng.integers(0, 10, count)
    x, y = (keras.tree.map_structure(lambda a: rows(np.asarray(a), count), d) for d in (x, y))
    return model, x, y


def application(
    name: str,
    input_shape: tuple[int, int, int],
    classes: int,
    loss: str = "sparse_categorical_crossentropy",
) -> keras.Model:
    """A model of `keras.applications` with random weights, compiled.

    Args:
        name: Its name.
        input_shape: Height, width and channels of the images.
        classes: How many classes it tells apart.
        loss: Its loss.

    Raises:
        ValueError: If the model does not take such images.
    """
    model = getattr(keras.applications, name)(
        weights=None, input_shape=input_shape, classes=classes
    )
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def call(name: str) -> tuple[keras.Model, Any, Any]:
    """What the function of a name, `"package.module:function"`, returns.

    Raises:
        ValueError: If there is no such function, or it does not return
            `(compiled model, x, y)`.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ValueError(
            f"There is no module {error.name!r} to take {name!r} from; run this where it can "
            "be imported, or put its folder on PYTHONPATH."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(
            f"Module {module_name!r} has no function {function_name!r}."
            f"{_suggest(function_name, dir(module))}"
        )
    built = function()
    if not (
        isinstance(built, tuple)
        and len(built) == 3
        and isinstance(built[0], keras.Model)
        and built[0].compiled
    ):
        raise ValueError(f"{name!r} must return (compiled keras.Model, x, y), got {built!r}.")
    return built


def _suggest(name: str, known: Sequence[str]) -> str:
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=5)
    return f" Close: {', '.join(lowered[c] for c in close)}." if close else ""


def rows(array: np.ndarray, count: int) -> np.ndarray:
    """The first `count` rows of an array, which is repeated as often as needed."""
    return np.resize(array, (count, *array.shape[1:]))
