"""Is everything there that the package needs? What `bittrain doctor` prints."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from bittrain_tf import allocator, native, private
from bittrain_tf.analysis import rss
from bittrain_tf.codecs import get_codec

_EXTRAS = {"plots": "matplotlib", "examples": "sklearn", "litert": "ai_edge_litert"}


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: What was looked at.
        ok: False if the package does not work without it.
        detail: What was found.
    """

    name: str
    ok: bool
    detail: str


def checks() -> list[Check]:
    """Look at versions, private symbols, the codec, measurement and optional extras."""
    backend = keras.backend.backend()
    return [
        Check("Python", True, platform.python_version()),
        Check("TensorFlow", True, tf.__version__),
        Check("Keras", True, keras.__version__),
        Check("NumPy", True, np.__version__),
        Check(
            "Keras backend",
            backend == "tensorflow",
            backend if backend == "tensorflow" else f"{backend}; set KERAS_BACKEND=tensorflow",
        ),
        _try("Codec", _check_codec),
        _try("Private symbols", _check_private),
        _try("Memory measurement", _check_rss),
        Check("Allocator", True, _allocator()),
        *(_extra(extra, module) for extra, module in _EXTRAS.items()),
    ]


def _try(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Exception as error:  # whatever is broken, the other checks are to be made
        return Check(name, False, f"{type(error).__name__}: {error}")


def _check_codec() -> str:
    codec = get_codec("bitmap")
    x = tf.constant([0.0, -0.0, 1e-40, 1.0, 0.0])
    decoded = codec.decode(codec.encode(x), x.shape, x.dtype)
    if not np.array_equal(decoded.numpy().view(np.int32), x.numpy().view(np.int32)):
        raise RuntimeError(f"bitmap is not lossless here: {x.numpy()} became {decoded.numpy()}")
    found = native.native()
    if found.ops is None:
        return f"bitmap by TensorFlow operations; no native kernels: {found.detail}"
    return f"bitmap by native kernels: {found.detail}"


def _check_private() -> str:
    x = tf.Variable([1.0])
    outside = private.recording()
    with tf.GradientTape():
        inside = private.recording() and private.recorded(tf.convert_to_tensor(x))
    layers = private.flatten_layers(keras.Sequential([keras.layers.ReLU()]))
    if outside or not inside or len(layers) != 1:
        raise RuntimeError(
            "the private symbols this package uses are there but behave in other ways; "
            "this TensorFlow or Keras version is not supported"
        )
    return "all there"


def _check_rss() -> str:
    rss.check_supported()
    return "peak RSS by /proc"


def _allocator() -> str:
    found = allocator.name()
    if found != "glibc":
        return found
    if "hugetlb" in os.environ.get("GLIBC_TUNABLES", ""):
        return "glibc, with huge pages"
    return (
        "glibc; GLIBC_TUNABLES=glibc.malloc.hugetlb=1, set before Python starts, makes steps of "
        "large tensors quicker where the kernel has huge pages"
    )


def _extra(extra: str, module: str) -> Check:
    installed = importlib.util.find_spec(module) is not None
    missing = f"not installed (optional: pip install bittrain-tf[{extra}])"
    return Check(f"Extra: {extra}", True, "installed" if installed else missing)
