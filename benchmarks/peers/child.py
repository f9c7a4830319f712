"""What `benchmarks.peers` runs in a child process: `python -m benchmarks.peers.child REQUEST.json`.

Does one task for one way of training one model, and writes what came of it, an error included,
to the path that the request names. Memory and time are measured as `bt.measure` does.
"""

import functools
import gc
import json
import pathlib
import re
import resource
import sys
import threading
import time

from benchmarks.peers.exactness import difference, snapshot
from benchmarks.peers.ways import STOCK, WAYS
from bittrain_tf.analysis import rss
from bittrain_tf.analysis.builder import build

_STEPS = 2  # batches in a round
_EXACT_STEPS = 3
_SEED = 0


def memory(request):
    """Peak RSS during training steps, and RSS just before them, in bytes."""
    train = trainer(request)
    train()  # traces, and makes the optimizer's variables
    gc.collect()
    resident = rss.resident()
    rss.reset_peak()
    for _ in range(request["rounds"]):
        train()
    return {"resident": resident, "peak": rss.peak()}


def timing(request):
    """CPU and wall seconds of stock and of the way, in turn, for the same samples."""
    trainers = {way: trainer(request, way) for way in (STOCK, request["way"])}
    for train in trainers.values():
        train()
    rounds = []
    for _ in range(request["rounds"]):
        rounds.append({})
        for way, train in trainers.items():
            cpu, wall = cpu_seconds(), time.perf_counter()
            train()
            rounds[-1][way] = {"cpu": cpu_seconds() - cpu, "wall": time.perf_counter() - wall}
    return {
        clock: [figures[request["way"]][clock] / figures[STOCK][clock] for figures in rounds]
        for clock in ("cpu", "wall")
    }


def exactness(request):
    """How weights, statistics and losses differ after one batch, and after some, from stock's."""
    stock, way = (trajectory(request, way) for way in (STOCK, request["way"]))
    return {
        "first": difference(stock[0], stock[1], way[1], way[0]),
        "last": difference(stock[0], stock[-1], way[-1], way[0]),
        "steps": _EXACT_STEPS,
    }


def need(request):
    """The most bytes of data (VmData) while the way trains."""
    most, done = 0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, data_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        train = trainer(request)
        for _ in range(request["rounds"]):
            train()
    finally:
        done.set()
        watcher.join()
    return {"data": most}


def trains(request):
    """Whether the way trains with no more bytes of data than that; if not, this process dies."""
    limit = request["limit"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train = trainer(request)
    for _ in range(request["rounds"]):
        train()
    return {"trains": True}


def trainer(request, way=None):
    """A function that trains a round."""
    way = WAYS[way or request["way"]]
    batch = request["batch_size"]
    model, x, y = way.make(builder(request, _STEPS), batch)
    return functools.partial(fit, model, x, y, batch // way.micro_batches)


def trajectory(request, way):
    """The state of the model before training, after one batch and after all."""
    way, batch = WAYS[way], request["batch_size"]
    model, x, y = way.make(builder(request, _EXACT_STEPS), batch)
    states = [snapshot(model, None)]
    for part in (slice(batch), slice(batch, None)):
        loss = fit(model, x[part], y[part], batch // way.micro_batches)
        states.append(snapshot(model, loss))
    return states


def builder(request, batches):
    """A function that builds the stock model and so many batches."""
    return functools.partial(
        build,
        request["model"],
        batch_size=request["batch_size"],
        image_size=request["image_size"],
        seed=_SEED,
        batches=batches,
    )


def fit(model, x, y, batch_size):
    """Train once on all of it; returns the mean loss."""
    history = model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
    return float(history.history["loss"][0])


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def data_bytes():
    """What RLIMIT_DATA limits: writable memory of this process alone, touched or not."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmData:\s*(\d+) kB", status)[1]) * 1024


def first_line(error):
    """What went wrong, in a line: the first one that says so."""
    # Keras and TensorFlow put lines before it, on where in the model or the graph it was.
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    where = r"Exception encountered|Graph execution error|in user code|Detected at|File |Arguments"
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if line and not re.match(where, line)]
    return f"{type(error).__name__}: {told[0] if told else text.strip()}"


TASKS = {
    "memory": memory,
    "timing": timing,
    "exactness": exactness,
    "need": need,
    "trains": trains,
}


def main():
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    try:
        result = TASKS[request["task"]](request)
    except Exception as error:
        result = {"error": first_line(error)}
    pathlib.Path(request["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
