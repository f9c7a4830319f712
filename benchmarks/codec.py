"""`python -m benchmarks.codec`: throughput of the bitmap codec, against copies and NumPy."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import random
import statistics
import sys
import time
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# By default glibc gives blocks above 32 MB back to the system when they are freed. The next buffer
# of that size is then faulted in page by page, which takes longer than what is to be measured.
# In training, memory is used again step after step. glibc reads this only when a process starts.
if __name__ == "__main__" and "mmap_threshold" not in os.environ.get("GLIBC_TUNABLES", ""):
    os.environ["GLIBC_TUNABLES"] = ":".join(
        [
            *filter(None, [os.environ.get("GLIBC_TUNABLES")]),
            "glibc.malloc.mmap_threshold=1073741824",
            "glibc.malloc.trim_threshold=4294967296",
        ]
    )
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from benchmarks.models import machine
from bittrain_tf import native
from bittrain_tf.analysis import plots, text
from bittrain_tf.codecs import get_codec
from bittrain_tf.native import kernels

KIB, MIB = 1 << 10, 1 << 20
MEMCPY, TF_COPY = COPIES = ("memcpy", "TensorFlow copy")
NATIVE, TF_OPS, NUMPY = CODECS = ("native", "TensorFlow ops", "NumPy")
DIRECTIONS = ("encode", "decode")
DTYPES = ("float16", "bfloat16", "float32", "float64")
_TURN = 0.03  # seconds; the caches have got used to a candidate after some six copies of 32 MiB

LEGEND = """\
GB/s (1e9 bytes) of dense data; in brackets the speed relative to memcpy and to TensorFlow's copy
(1.00 is as fast, 2.00 twice as fast). memcpy: numpy.copyto into a warm buffer, one thread.
TensorFlow copy: DeepCopy. native, TensorFlow ops: the bitmap codec with its native kernels and
without, as a tf.function, as layers use it. So is TensorFlow's copy: calling a tf.function takes
some 0.2 ms, which a layer in the middle of a training step does not pay and small sizes show.
Each is called again and again in its turn, for 30 ms. The latter half of these calls is shown. The
first one, which finds in the caches what others left there, nearer to training, is in the last
line and in the JSON file."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One point: what is encoded and decoded, and with how many threads in the native kernels."""

    threads: int
    nbytes: int = 32 * MIB
    dtype: str = "float32"
    density: float = 0.5


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a case.

    Attributes:
        case: The case.
        rounds: How often.
        kept: Bytes kept over dense bytes.
        seconds: Median by name, of calls that follow others of the same candidate.
        cold_seconds: Likewise, of calls that follow those of another.
    """

    case: Case
    rounds: int
    kept: float
    seconds: dict[str, float]
    cold_seconds: dict[str, float]

    def throughput(self, name):
        """GB/s of dense data."""
        return self.case.nbytes / self.seconds[name] / 1e9

    def speed(self, name, copy):
        """How many times as fast as a copy."""
        return self.seconds[copy] / self.seconds[name]


def main():
    options = parse()
    # The kernels run on CPUs, and are not available where TensorFlow sees anything else.
    tf.config.set_visible_devices(tf.config.get_visible_devices("CPU"))
    threads = kernels.threads()
    results = measure_all(sweeps(threads, options.quick), Case(threads), options.quick)
    accepted = results["threads"][-1]
    cold = dataclasses.replace(accepted, seconds=accepted.cold_seconds)
    lines = [
        about(threads, options.quick),
        acceptance(accepted),
        f"The first calls alone, caches cold: {acceptance(cold)}",
    ]
    if options.json:
        options.json.write_text(json.dumps(as_json(results, lines), indent=1) + "\n")
    if options.output:
        draw(options.output, results)
    print(report(results))
    print("\n".join(lines))


def parse():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codec", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points, less time for each")
    parser.add_argument("--output", type=pathlib.Path, help="draw it, say into docs/codec.png")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    options = parser.parse_args()
    for path in filter(None, (options.output, options.json)):
        if path.exists() and not options.overwrite:
            parser.error(f"{path} exists already; choose another name or pass --overwrite.")
        if not path.absolute().parent.is_dir():
            parser.error(f"{path.parent} is no folder.")
    if options.output:
        try:
            plots.check_path(options.output, overwrite=True)
        except (ImportError, ValueError) as error:
            parser.error(str(error))
    return options


def sweeps(threads, quick):
    """The cases of each sweep."""
    densities = (0.0, 0.5, 1.0) if quick else tuple(i / 10 for i in range(11))
    sizes = (4 * KIB, MIB, 16 * MIB) if quick else tuple(4 * KIB * 4**i for i in range(9))
    same_size = 4 * MIB if quick else Case.nbytes
    # TensorFlow's own threads are fixed once it has started, so only the kernels have a choice.
    thread_counts = sorted({1, threads}) if native.available() else [threads]
    return {
        "density": [Case(threads, density=density) for density in densities],
        "size": [Case(threads, nbytes=nbytes) for nbytes in sizes],
        "dtype": [Case(threads, nbytes=same_size, dtype=dtype) for dtype in DTYPES],
        "threads": [Case(count) for count in thread_counts],
    }


def measure_all(cases_by_sweep, accepted, quick):
    """The results of each sweep; a case that is in several is measured once."""
    budget, min_rounds = (0.3, 3) if quick else (4.0, 5)
    measured = {}
    with Progress(console=Console(stderr=True)) as progress:
        cases = dict.fromkeys(case for cases in cases_by_sweep.values() for case in cases)
        for case in progress.track(cases, description="measuring"):
            # The case that is quoted gets more time than those that only make up a curve.
            share = 4 if case == accepted else 1
            measured[case] = measure(case, share * budget, min_rounds)
    return {name: [measured[case] for case in cases] for name, cases in cases_by_sweep.items()}


def measure(case, budget, min_rounds):
    """The result of a case, after so many seconds and at least so many rounds."""
    x = data(case)
    tensor = tf.constant(x)
    # NumPy has no bfloat16 of its own; as integers it compares them as fast as any.
    plain = x.view(np.uint16) if case.dtype == "bfloat16" else x
    candidates = copies(x, tensor)
    if native.available():
        candidates |= checked(NATIVE, x, *tensorflow_codec(tensor, True, case.threads))
    candidates |= checked(TF_OPS, x, *tensorflow_codec(tensor, False, case.threads))
    candidates |= checked(NUMPY, plain, *numpy_codec(plain))
    density = np.count_nonzero(plain) / x.size
    kept = get_codec("bitmap").nbytes(x.size, tensor.dtype, density) / x.nbytes
    rounds, seconds, cold_seconds = time_all(candidates, budget, min_rounds)
    return Result(case, rounds, kept, seconds, cold_seconds)


def data(case):
    """Values that are zero at random, the hardest case for branches; no -0.0, which NumPy loses."""
    dtype = tf.as_dtype(case.dtype)
    generator = np.random.default_rng(0)
    x = aligned(case.nbytes // dtype.size, dtype.as_numpy_dtype)
    x[:] = 1 + generator.random(x.size, np.float32)
    x[generator.random(x.size, np.float32) >= case.density] = 0
    return x


def aligned(size, dtype):
    """An array that starts where a cache line does, as TensorFlow's do: copies are faster."""
    nbytes = size * np.dtype(dtype).itemsize
    buffer = np.zeros(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype)


def copies(x, tensor):
    source, target = as_bytes(x), aligned(x.nbytes, np.uint8)
    deep_copy = tf.function(lambda x: tf.raw_ops.DeepCopy(x=x), autograph=False)
    return {
        MEMCPY: lambda: np.copyto(target, source),
        TF_COPY: lambda: deep_copy(tensor),
    }


def tensorflow_codec(tensor, use_native, threads):
    """Functions `encode()` and `decode(*parts)` of the codec as layers call it."""
    codec = get_codec("bitmap")
    encode = tf.function(codec.encode, autograph=False)
    decode = tf.function(
        lambda *parts: codec.decode(parts, tensor.shape, tensor.dtype), autograph=False
    )
    # Both are traced here, and keep what they have been traced with.
    with backend(use_native, threads):
        decode(*encode(tensor))
    return lambda: encode(tensor), decode


@contextlib.contextmanager
def backend(use_native, threads):
    """With the native kernels on so many threads, or without them."""
    with (
        mock.patch("bittrain_tf.native.available", return_value=use_native),
        mock.patch("bittrain_tf.native.kernels.threads", return_value=threads),
    ):
        yield


def numpy_codec(x):
    """The same in NumPy."""

    def encode():
        nonzero = x != 0
        return np.packbits(nonzero, bitorder="little"), x[nonzero]

    def decode(bitmap, values):
        decoded = np.zeros(x.size, x.dtype)
        nonzero = np.unpackbits(bitmap, count=x.size, bitorder="little").view(bool)
        decoded[nonzero] = values
        return decoded

    return encode, decode


def checked(name, x, encode, decode):
    """What to time of a codec, once its round trip is known to be exact."""
    parts = encode()
    if not np.array_equal(as_bytes(decode(*parts)), as_bytes(x)):
        raise AssertionError(f"{name}: {x.size} {x.dtype} do not survive the round trip.")
    return {f"{name} encode": encode, f"{name} decode": lambda: decode(*parts)}


def as_bytes(x):
    return np.ascontiguousarray(x).view(np.uint8)


def time_all(candidates, budget, min_rounds):
    """The number of rounds, and of each candidate its median times: warm and cold caches.

    Round by round, in changing order, so that what else the machine does strikes all alike.
    """
    warm = {name: [] for name in candidates}
    cold = {name: [] for name in candidates}
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    for candidate in candidates.values():
        candidate()  # for warm buffers
    end = time.perf_counter() + budget
    rounds = 0
    while rounds < min_rounds or time.perf_counter() < end:
        shuffle(order)
        for name in order:
            times = turn(candidates[name])
            cold[name].append(times[0])
            warm[name].append(statistics.median(times[len(times) // 2 :]))
        rounds += 1
    return rounds, medians(warm), medians(cold)


def turn(candidate):
    """Seconds of one call after the other, two at least."""
    end = time.perf_counter() + _TURN
    times = [seconds_of(candidate), seconds_of(candidate)]
    while time.perf_counter() < end:
        times.append(seconds_of(candidate))
    return times


def medians(times):
    return {name: statistics.median(taken) for name, taken in times.items()}


def seconds_of(candidate):
    start = time.perf_counter()
    result = candidate()
    taken = time.perf_counter() - start
    del result  # after the clock was read: freeing is not part of it
    return taken


def as_json(results, lines):
    return {
        "about": lines[0],
        "acceptance": lines[1:],
        "sweeps": {
            name: [
                dataclasses.asdict(r) | {"gb_per_s": {key: r.throughput(key) for key in r.seconds}}
                for r in sweep
            ]
            for name, sweep in results.items()
        },
    }


def report(results):
    tables = [
        sweep_table(name, results[name], direction) for name in results for direction in DIRECTIONS
    ]
    return text.to_text(*tables) + LEGEND + "\n"


def sweep_table(name, sweep, direction):
    columns = [name, *COPIES, *CODECS]
    rows = [
        [label(name, r.case), *(f"{r.throughput(copy):.2f}" for copy in COPIES)]
        + [cell(r, f"{codec} {direction}") for codec in CODECS]
        for r in sweep
    ]
    by = "threads of the native kernels" if name == "threads" else name
    title = f"{direction} by {by}: {common(name, sweep[0].case)}"
    if name == "density":
        bits = 8 * tf.as_dtype(sweep[0].case.dtype).size
        title += f" (kept is less than dense below density {1 - 1 / bits:.3f})"
        columns.insert(1, "kept/dense")
        for row, r in zip(rows, sweep, strict=True):
            row.insert(1, f"{r.kept:.3f}")
    return text.table(title, columns, rows, numeric=columns[1:])


def cell(result, name):
    if name not in result.seconds:
        return "-"
    ratios = ", ".join(f"{result.speed(name, copy):.2f}" for copy in COPIES)
    return f"{result.throughput(name):.2f} ({ratios})"


def label(name, case):
    """What tells a case from the others of its sweep."""
    labels = {"density": f"{case.density:.1f}", "size": size_label(case.nbytes)}
    return labels.get(name) or str(getattr(case, name))


def common(name, case):
    """What all cases of a sweep share."""
    shared = {
        "size": size_label(case.nbytes),
        "dtype": case.dtype,
        "density": f"density {case.density}",
        "threads": f"threads {case.threads}",
    }
    return ", ".join(value for key, value in shared.items() if key != name)


def size_label(nbytes):
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def acceptance(result):
    """float32, 8 Mi elements, density 0.5, in one line."""
    codec = NATIVE if f"{NATIVE} encode" in result.seconds else TF_OPS
    parts = [
        f"{direction} {result.throughput(name):.2f} GB/s = "
        + ", ".join(f"{result.speed(name, copy):.2f} x {copy}" for copy in COPIES)
        for direction in DIRECTIONS
        for name in [f"{codec} {direction}"]
    ]
    case = result.case
    elements = case.nbytes // tf.as_dtype(case.dtype).size // MIB
    return (
        f"{case.dtype}, {elements} Mi elements ({size_label(case.nbytes)}), density "
        f"{case.density}, {codec}, threads {case.threads}, median of {result.rounds} rounds: "
        + "; ".join(parts)
    )


def about(threads, quick):
    """When and where, and what became of the native kernels."""
    found = native.native()
    state = found.detail if found.ops else f"NOT AVAILABLE and so not measured: {found.detail}"
    return (
        f"{datetime.date.today()}{', --quick' if quick else ''}: {machine()}, threads {threads}, "
        f"TensorFlow {tf.__version__}, NumPy {np.__version__}; native kernels: {state}"
    )


def draw(path, results):
    """Density and size sweep, encode and decode, all candidates."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharey=True)
    for row, name in zip(axes, ("density", "size"), strict=True):
        for ax, direction in zip(row, DIRECTIONS, strict=True):
            draw_sweep(ax, name, results[name], direction)
    figure.suptitle("Bitmap codec: GB/s of dense data")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path)


def draw_sweep(ax, name, sweep, direction):
    lines = [(copy, copy, "--") for copy in COPIES]
    lines += [(codec, f"{codec} {direction}", "o-") for codec in CODECS]
    across = [r.case.density if name == "density" else r.case.nbytes for r in sweep]
    for shown, key, style in lines:
        if all(key in r.seconds for r in sweep):
            ax.plot(across, [r.throughput(key) for r in sweep], style, label=shown)
    ax.set_yscale("log")
    ax.grid(alpha=0.3, which="both")
    ax.set_title(f"{direction}: {common(name, sweep[0].case)}", fontsize="medium")
    ax.set_xlabel(name)
    ax.set_ylabel("GB/s")
    if name == "size":
        ax.set_xscale("log", base=2)
        ax.set_xticks(across, [label(name, r.case) for r in sweep], rotation=45)


if __name__ == "__main__":
    main()
