"""The largest batch that trains within a limit of memory: what stock needs for one of its batches.

The limit is RLIMIT_DATA: what the process may have of writable memory of its own. RLIMIT_RSS is
of no effect in Linux, and RLIMIT_AS counts libraries and reserved addresses, which are most of
TensorFlow's address space and have nothing to do with training.
"""

from benchmarks.peers.ways import STOCK

WAYS = (STOCK, "compressed", "compressed-1.25", "compressed-half", "recompute")
_ROOM = 1.01  # of the limit over what stock was seen to have: it is looked at every millisecond
_MOST = 32  # times the batch the limit is for


def largest(run, case, ways, step, note):
    """The limit in bytes, and the largest batch, a multiple of `step`, by way.

    Args:
        run: Called with a request, returns what came of it.
        case: The model, batch size and image size that the limit is taken from.
        ways: What to try.
        step: The batch sizes tried are multiples of this.
        note: Called with a line before each try.
    """
    note("what stock needs")
    needed = run({**case, "task": "need", "way": STOCK})
    if "error" in needed:
        return needed
    limit = int(_ROOM * needed["data"])

    def trains(way, batch):
        note(f"{way}, batch {batch}")
        request = {**case, "task": "trains", "way": way, "limit": limit, "batch_size": batch}
        return "error" not in run(request)

    batches = {way: bisect(lambda n, w=way: trains(w, n * step), case, step) for way in ways}
    return {"limit": limit, "batches": batches}


def bisect(trains, case, step):
    """The largest batch that trains; 0 if not even `step` does."""
    start = max(1, case["batch_size"] // step)
    good, bad = 0, start
    while bad <= _MOST * start and trains(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if trains(middle):
            good = middle
        else:
            bad = middle
    return good * step
