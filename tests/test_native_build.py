"""Where the native kernels come from: a cache, a compiler, a wheel; and what happens without."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

from bittrain_tf import native
from bittrain_tf.native import build

ROOT = pathlib.Path(__file__).parents[1]
COMPILERS = [os.environ["CXX"]] if "CXX" in os.environ else build._COMPILERS
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")

PROBE = """
import json, sys, time, warnings
import tensorflow as tf
import bittrain_tf
from bittrain_tf import native
from bittrain_tf.codecs import get_codec
assert "bittrain_encode" not in str(native.load._native)  # not before it is needed
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    begin = time.perf_counter()
    x = tf.constant([[0.0, 2.0, 0.0], [-0.0, 0.0, 1e-40]])
    for _ in range(2):
        codec = get_codec("bitmap")
        y = codec.decode(codec.encode(x), x.shape, x.dtype)
    seconds = time.perf_counter() - begin
bits = lambda t: tf.bitcast(t, tf.int32).numpy().tolist()
print(json.dumps({
    "available": native.available(),
    "detail": native.native().detail,
    "file": bittrain_tf.__file__,
    "warnings": [str(w.message) for w in caught if w.category is RuntimeWarning],
    "lossless": bits(x) == bits(y),
    "seconds": seconds,
}))
"""


def start(python=sys.executable, cwd=ROOT, **environment):
    """A process that uses the codec and reports; an environment variable of None is left out."""
    merged = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    merged = {name: str(value) for name, value in merged.items() if value is not None}
    return subprocess.Popen(
        [python, "-c", PROBE],
        cwd=cwd,
        env=merged,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["lossless"]
    return found


@pytest.fixture
def without_compiler(tmp_path):
    """A PATH with nothing on it."""
    empty = tmp_path / "bin"
    empty.mkdir()
    return {"PATH": empty, "CXX": None}


@needs_compiler
@pytest.mark.slow
def test_two_processes_compile_at_once_in_an_empty_cache(tmp_path):
    both = [start(XDG_CACHE_HOME=tmp_path, PATH=os.environ["PATH"]) for _ in range(2)]
    for found in map(report, both):
        assert found["available"], found
        assert str(tmp_path) in found["detail"]
        assert found["warnings"] == []
    (folder,) = (tmp_path / "bittrain_tf").iterdir()
    assert [path.name for path in folder.iterdir()] == [build.LIBRARY]
    assert stat.S_IMODE((tmp_path / "bittrain_tf").stat().st_mode) & 0o022 == 0
    compiled = (folder / build.LIBRARY).stat().st_mtime_ns
    again = report(start(XDG_CACHE_HOME=tmp_path, PATH=""))
    assert again["available"]  # without a compiler now
    assert (folder / build.LIBRARY).stat().st_mtime_ns == compiled


@needs_compiler
@pytest.mark.slow
def test_compiles_within_ten_seconds_of_cpu_time(tmp_path):
    before = os.times()
    build.build(tmp_path / build.LIBRARY)
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 10


@needs_compiler
@pytest.mark.slow
def test_a_damaged_library_is_compiled_anew(tmp_path):
    library = tmp_path / "bittrain_tf" / build.key() / build.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF but not really")
    found = report(start(XDG_CACHE_HOME=tmp_path))
    assert found["available"], found
    assert library.stat().st_size > 10_000


def test_no_compiler_is_one_warning_and_tensorflow_takes_over(tmp_path, without_compiler):
    found = report(start(XDG_CACHE_HOME=tmp_path / "cache", **without_compiler))
    assert not found["available"]
    (warning,) = found["warnings"]
    assert "no C++ compiler found" in warning
    assert "BITTRAIN_NATIVE=0" in warning
    assert "same result" in warning
    assert not (tmp_path / "cache" / "bittrain_tf").exists()


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "bittrain_tf").write_text("a file where the folder would be")
    found = report(start(XDG_CACHE_HOME=tmp_path))
    assert not found["available"]
    (warning,) = found["warnings"]
    assert "cannot be written" in warning


def test_switched_off(tmp_path):
    found = report(start(XDG_CACHE_HOME=tmp_path, BITTRAIN_NATIVE="0"))
    assert not found["available"]
    assert found["detail"] == "switched off by BITTRAIN_NATIVE=0"
    assert found["warnings"] == []
    assert not (tmp_path / "bittrain_tf").exists()


def test_compiler_errors_are_quoted(tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cc:1: error: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildError, match="no such luck"):
        build.build(tmp_path / "out" / build.LIBRARY)
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="CXX=no-such-compiler"):
        build.build(tmp_path / build.LIBRARY)


def test_the_key_changes_with_the_sources(tmp_path, monkeypatch):
    before = build.key()
    for path in build.SOURCE.iterdir():
        if path.suffix in (".cc", ".h", ".inc"):
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    assert build.key() == before
    (tmp_path / "mask.h").write_text("// another")
    assert build.key() != before


@needs_compiler
@pytest.mark.slow
def test_a_wheel_in_an_empty_environment(tmp_path, without_compiler):
    """Prebuilt kernels need no compiler and no cache; a pure wheel compiles, or does without."""
    wheels = tmp_path / "wheels"
    command = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    command += ["--quiet", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    (wheel,) = wheels.iterdir()
    assert "none-any" not in wheel.name

    python = environment(tmp_path / "venv", wheel)
    prebuilt = report(
        start(python, tmp_path, XDG_CACHE_HOME=tmp_path / "unused", **without_compiler)
    )
    assert str(tmp_path / "venv") in prebuilt["file"]
    assert prebuilt["available"], prebuilt
    assert prebuilt["detail"].startswith("prebuilt")
    assert prebuilt["warnings"] == []
    assert not (tmp_path / "unused" / "bittrain_tf").exists()

    (pathlib.Path(prebuilt["file"]).parent / "native" / build.LIBRARY).unlink()
    pure = report(start(python, tmp_path, XDG_CACHE_HOME=tmp_path / "unused", **without_compiler))
    assert not pure["available"]
    assert len(pure["warnings"]) == 1
    both = [start(python, tmp_path, XDG_CACHE_HOME=tmp_path / "cache") for _ in range(2)]
    for found in map(report, both):
        assert found["available"], found


def environment(folder, wheel):
    """Python of a new virtual environment with the wheel, and this one's packages behind it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    command = ["pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *command], check=True)
    import tensorflow

    behind = pathlib.Path(tensorflow.__file__).parents[1]
    (site / "behind.pth").write_text(f"{behind}\n")
    return python


def test_kernels_run_on_several_devices_at_once():
    """Replicas of one process share the threads."""
    script = """
import tensorflow as tf, keras, numpy as np
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import bittrain_tf as bt
from bittrain_tf import native
rng = np.random.default_rng(0)
x, y = rng.random((16, 16, 16, 3), "float32"), rng.integers(0, 3, 16)
losses = []
for on in (False, True):
    keras.utils.set_random_seed(0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((16, 16, 3)),
            *[keras.layers.Conv2D(8, 3, activation="relu") for _ in range(3)],
            keras.layers.Flatten(), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if on:
        bt.compress(model)
    losses.append(model.fit(x, y, epochs=3, verbose=0, shuffle=False).history["loss"])
assert np.allclose(*losses, rtol=1e-6), losses
print("native" if native.available() else "tensorflow")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == ("native" if native.available() else "tensorflow")


def test_threads_are_as_many_as_tensorflow_uses():
    script = """
import tensorflow as tf
from bittrain_tf.native.kernels import threads
import os
assert threads() == len(os.sched_getaffinity(0))
tf.config.threading.set_intra_op_parallelism_threads(3)
assert threads() == 3
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)


@needs_compiler
def test_a_child_process_of_a_fork_still_gets_its_work_done(tmp_path):
    """The threads are the parent's; the child's calling thread does it all."""
    script = """
import os, numpy as np, tensorflow as tf
from bittrain_tf import native
x = tf.constant(np.random.default_rng(0).standard_normal(1 << 20), tf.float32)
native.mark_positive(x)
child = os.fork()
if child == 0:
    os._exit(0 if native.mark_positive(x).shape == (1 << 17,) else 1)
import time
for _ in range(600):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
assert done and os.waitstatus_to_exitcode(status) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, timeout=300)
