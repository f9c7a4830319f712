"""Finding the native kernels: prebuilt in the wheel, or compiled on first use, or not at all."""

from __future__ import annotations

import ctypes
import os
import pathlib
import threading
import types
import warnings
from typing import NamedTuple

import tensorflow as tf

from bittrain_tf.native.build import LIBRARY, SOURCE, BuildError, build, key

_SWITCH = "BITTRAIN_NATIVE"
_PREBUILT = SOURCE / LIBRARY


class Native(NamedTuple):
    """What came of looking for the kernels.

    Attributes:
        ops: TensorFlow's Python module of the operations; None if they are not to be had.
        detail: Where they come from, or why they are not to be had.
    """

    ops: types.ModuleType | None
    detail: str


_lock = threading.Lock()
_native: Native | None = None


def native() -> Native:
    """The kernels, looked for once in a process; warns if they should be there and are not."""
    global _native
    if _native is None:
        complaint = None
        with _lock:
            if _native is None:
                try:
                    _native = _find()
                except (BuildError, RuntimeError, OSError, tf.errors.OpError) as error:
                    _native, complaint = Native(None, str(error)), error
        if complaint is not None:
            warnings.warn(
                "bittrain_tf compresses with TensorFlow operations, which give the same result "
                f"but take more time: its native kernels are not available, since {complaint}. "
                f"Install a C++ compiler, or set {_SWITCH}=0 to do without them and this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _native


def cache_folder() -> pathlib.Path:
    """Where kernels compiled for this user, these sources and this TensorFlow are."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return pathlib.Path(caches).expanduser() / "bittrain_tf" / key()


def _find() -> Native:
    if os.environ.get(_SWITCH, "1") == "0":
        return Native(None, f"switched off by {_SWITCH}=0")
    others = {d.device_type for d in tf.config.get_visible_devices()} - {"CPU"}
    if others:
        return Native(None, f"they run on CPUs, and TensorFlow sees a {', '.join(sorted(others))}")
    return _load_or_build()


def _load_or_build() -> Native:
    if _PREBUILT.exists():
        try:
            return Native(_load(_PREBUILT), f"prebuilt, {_instruction_set(_PREBUILT)}")
        except (tf.errors.OpError, OSError):
            pass  # for another kind of machine or an older system; compiling may still do
    library = cache_folder() / LIBRARY
    if not library.exists():
        build(library)
    try:
        ops = _load(library)
    except (tf.errors.OpError, OSError):
        build(library)  # whatever has become of it
        ops = _load(library)
    return Native(ops, f"{library}, {_instruction_set(library)}")


def _load(library: pathlib.Path) -> types.ModuleType:
    ops = tf.load_op_library(str(library))
    if not hasattr(ops, "bittrain_encode"):
        raise RuntimeError(f"{library} registers no operations with TensorFlow {tf.__version__}")
    return ops


def _instruction_set(library: pathlib.Path) -> str:
    function = ctypes.CDLL(str(library)).bittrain_instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()
