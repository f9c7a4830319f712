"""The native kernels' algorithms on random inputs, under the address and undefined sanitizers.

`make fuzz` runs them for longer; see `native_fuzz.cc`.
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import subprocess

import pytest

from bittrain_tf.native import build

SOURCE = pathlib.Path(__file__).with_name("native_fuzz.cc")
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SECONDS = os.environ.get("BITTRAIN_FUZZ_SECONDS", "5")
SEED = os.environ.get("BITTRAIN_FUZZ_SEED", "0")

# What the kernels ask of a processor, by the names that Linux has for it.
AVX2 = {"avx2", "popcnt", "bmi1"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vbmi2"}


def compiled(compiler, headers, program, *flags):
    command = [compiler, *FLAGS, *flags, f"-I{headers}", str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return program


def run(*command):
    """Exit status and output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=int(SECONDS) + 300)
    return done.returncode, done.stdout + done.stderr


def instruction_sets():
    """Those this machine is known to have."""
    found = {"portable"}
    if platform.machine() == "aarch64":
        found.add("neon")
    info = pathlib.Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and info.exists():
        lines = info.read_text().splitlines()
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
        found |= {name for name, needs in [("avx2", AVX2), ("avx512", AVX512)] if needs <= flags}
    return found


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C++ compiler that has the sanitizers, and a system on which they run."""
    try:
        path = build._compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cc").write_text("int main() { return 0; }\n")
    command = [path, *SANITIZERS, str(folder / "probe.cc"), "-o", str(folder / "probe")]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(f"{path} has no sanitizer libraries")
    if subprocess.run([folder / "probe"], capture_output=True).returncode != 0:
        pytest.skip("programs with sanitizers do not run here")
    return path


def test_random_inputs_under_sanitizers(compiler, tmp_path):
    program = compiled(compiler, build.SOURCE, tmp_path / "fuzz", *SANITIZERS)
    status, output = run(program, SECONDS, SEED)
    print(output)
    assert status == 0, output
    assert output.startswith("passed")
    assert instruction_sets() <= set(output.partition(":")[2].split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "before", "after", "complaint"),
    [
        ("bitmap.h", "end - values >= length ||", "true ||", "AddressSanitizer"),
        ("bitmap.h", "room = end - values >= length;", "room = true;", "AddressSanitizer"),
        ("blocks.h", "x[__builtin_ctzll(left)] = *next++", "x[0] = *next++", "Expand restores"),
        ("blocks.h", "same &= (x[i] != 0) == (mask >> i & 1)", "same &= true", "a wrong one"),
        ("mask.h", "finite ? sign :", "finite ? uint16_t{0} :", "MultiplyBits by zero"),
        ("float_loops.inc", "c] = v >= high ? high : v", "c] = v", "affine"),
        ("batch_norm.h", "sum[i] += part[i]", "sum[i] = part[i]", "dbeta"),
        ("pooling.h", "place = static_cast<int32_t>(k + 1)", "place = 1", "marks the first"),
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
    assert "of seed 0: " in output  # the case, whoever complains


@pytest.mark.slow
def test_random_inputs_on_aarch64(tmp_path):
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not (cross and emulator):
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64-static")
    program = compiled(cross, build.SOURCE, tmp_path / "fuzz", "-static")
    status, output = run(emulator, program, SECONDS, SEED)
    assert status == 0, output
    assert {"neon", "portable"} <= set(output.partition(":")[2].split())
