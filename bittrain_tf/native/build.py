"""Compiling the native kernels."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import tensorflow as tf

SOURCE = pathlib.Path(__file__).parent
LIBRARY = "libbittrain.so"  # not after a Python module, which it would stand in for
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300
# No contraction: a fused multiply-add would give other bits than TensorFlow's two operations.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
)


class BuildError(RuntimeError):
    """The kernels could not be compiled; the message says why."""


def key() -> str:
    """What a compiled library is good for: these sources, this TensorFlow, this machine."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCE.glob("*.cc"), *SOURCE.glob("*.h"), *SOURCE.glob("*.inc")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(" ".join([*_FLAGS, tf.__version__, platform.system()]).encode())
    return f"{tf.__version__}-{platform.machine()}-{digest.hexdigest()[:16]}"


def build(library: pathlib.Path, *flags: str) -> None:
    """Compile the kernels to `library`, which appears complete or not at all.

    Args:
        library: Where to. Two processes may build the same at once; either result stands.
        *flags: More flags for the compiler.

    Raises:
        BuildError: If there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = _compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as folder:
            fresh = pathlib.Path(folder) / library.name
            command = [compiler, *_FLAGS, *flags, f"-I{tf.sysconfig.get_include()}"]
            command += [str(SOURCE / "kernels.cc"), "-o", str(fresh)]
            _run([*command, *tf.sysconfig.get_link_flags()])
            os.replace(fresh, library)
    except OSError as error:
        raise BuildError(f"{library.parent} cannot be written ({error})") from error


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    looked_for = f"CXX={wanted}" if wanted else ", ".join(_COMPILERS)
    raise BuildError(f"no C++ compiler found (looked for {looked_for})")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not finish in {_SECONDS} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise BuildError(f"{command[0]} failed: {lines[0].strip()}")
