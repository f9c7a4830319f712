"""The native kernels' algorithms on random inputs, under the address and undefined sanitizers.

`make fuzz` runs them for longer; see `native_fuzz.cc`.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest

from bittrain_tf.native import build

SOURCE = pathlib.Path(__file__).with_name("native_fuzz.cc")
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SECONDS = os.environ.get("BITTRAIN_FUZZ_SECONDS", "5")
SEED = os.environ.get("BITTRAIN_FUZZ_SEED", "0")


def compiled(compiler, headers, program, *flags):
    command = [compiler, *FLAGS, *flags, f"-I{headers}", str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return program


def run(*command):
    """Exit status and output."""
    timeout = int(SECONDS) + 300
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C++ compiler that has the sanitizers."""
    try:
        path = build._compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cc").write_text("int main() { return 0; }\n")
    command = [path, *SANITIZERS, str(folder / "probe.cc"), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{path} has no sanitizer libraries")
    return path


def test_random_inputs_under_sanitizers(compiler, tmp_path):
    program = compiled(compiler, build.SOURCE, tmp_path / "fuzz", *SANITIZERS)
    status, output = run(program, SECONDS, SEED)
    assert status == 0, output
    print(output)
    assert output.startswith("passed")
    assert "portable" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "before", "after", "complaint"),
    [
        ("bitmap.h", "end - values >= length ||", "true ||", "AddressSanitizer"),
        ("bitmap.h", "const bool room = end - values >= length;", "const bool room = true;", "Add"),
        ("blocks.h", "*next++ = x[__builtin_ctzll(left)];", "*next++ = x[0];", "Compress keeps"),
        ("batch_norm.h", "sum[i] += part[i]", "sum[i] = part[i]", "dbeta"),
    ],
)
def test_a_mistake_is_found(compiler, tmp_path, header, before, after, complaint):
    headers = tmp_path / "native"
    shutil.copytree(build.SOURCE, headers)
    text = (headers / header).read_text()
    assert text.count(before) == 1
    (headers / header).write_text(text.replace(before, after))
    program = compiled(compiler, headers, tmp_path / "fuzz", *SANITIZERS)
    status, output = run(program, "20", "0")
    assert status != 0
    assert complaint in output


@pytest.mark.slow
def test_random_inputs_on_aarch64(tmp_path):
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not (cross and emulator):
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64-static")
    program = compiled(cross, build.SOURCE, tmp_path / "fuzz", "-static")
    status, output = run(emulator, program, SECONDS, SEED)
    assert status == 0, output
    assert "neon" in output
