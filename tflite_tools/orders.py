"""Orders of a graph's operators in which little is alive at once.

Finding the best order is NP-hard (Sethi, 1975: register allocation is). In a training step most
of it is decided by a few things: what a backward operation needs is best made just before it, and
what lets go of memory is best done at once. Each order here is a pass over the graph in linear
time, or nearly so; `lowest` tries them, and starts again from what they found.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from tflite_tools.graph import Graph

_ROUNDS = 4


def lowest(graph: Graph) -> list[int]:
    """The best order found: lowest peak, then fewest bytes held over time. Never a worse one."""
    original = list(range(len(graph)))
    candidates = [
        original,
        greedy(graph),
        on_demand(graph, original, _makes_weights(graph)),
        part_by_part(graph),
    ]
    # Of equals the first, which comes of the original.
    best = min((_settled(graph, order) for order in candidates), key=itemgetter(0))[1]
    with_reads = reads_first(graph, best)
    worse = graph.peak(with_reads).nbytes > graph.peak(original).nbytes
    return best if worse else with_reads


def reads_first(graph: Graph, order: Sequence[int]) -> list[int]:
    """`order`, but what has an output of unknown shape before all else, where that can be.

    The interpreter plans its memory from one such operation to the next, and cannot move later
    what it has placed. The outputs of these are its own, and stay.
    """
    first = set()
    for i in range(len(graph)):
        if graph.names[i] in ("VAR_HANDLE", "CALL_ONCE", "READ_VARIABLE") and (
            graph.before[i] <= first
        ):
            first.add(i)
    return [i for i in order if i in first] + [i for i in order if i not in first]


def _settled(graph: Graph, order: list[int]) -> tuple[tuple[int, int], list[int]]:
    """`order`, settled as long as that makes it better, and its score."""
    score = _score(graph, order)
    for _ in range(_ROUNDS):
        settled = [settle(graph, order, eager) for eager in (False, True)]
        better, best = min(((_score(graph, o), o) for o in settled), key=itemgetter(0))
        if better >= score:
            break
        score, order = better, best
    return score, order


def _score(graph: Graph, order: Sequence[int]) -> tuple[int, int]:
    held = list(graph.held(order))
    return max(held, default=0), sum(held)


def greedy(graph: Graph) -> list[int]:
    """Of what can run, always what adds least to the live bytes; the newest of equals."""
    emission = _Emission(graph)
    ready = {i for i, missing in enumerate(emission.missing) if not missing}
    since = [0] * len(graph)
    while ready:
        i = min(ready, key=lambda i: (emission.growth(i), -since[i], i))
        ready.remove(i)
        for newly in emission.emit(i):
            ready.add(newly)
            since[newly] = len(emission.order)
    return emission.order


def on_demand(graph: Graph, order: Sequence[int], anchors: Iterable[int]) -> list[int]:
    """`anchors` in their order, whatever each needs just before it, and the rest at the end."""
    emission = _Emission(graph)
    position = {i: k for k, i in enumerate(order)}
    wanted = set(anchors)
    for i in [*(i for i in order if i in wanted), *order]:
        _emit_needed(emission, i, position)
    return emission.order


def part_by_part(graph: Graph) -> list[int]:
    """What needs the first parts of tensors that are split, then what needs the next, and so on.

    A step in microbatches trains one before it begins another.
    """
    part = [0] * len(graph)
    for i in range(len(graph)):  # the file's order is one in which everything comes after its needs
        part[i] = max((part[j] for j in graph.before[i]), default=0)
        for t in graph.inputs[i]:
            maker = graph.maker.get(t)
            if maker is not None and graph.names[maker] == "SPLIT":
                part[i] = max(part[i], graph.outputs[maker].index(t))
    handed_on = {j for i, before in enumerate(graph.before) for j in before if part[j] < part[i]}
    order = sorted(range(len(graph)), key=lambda i: (part[i], i))
    return on_demand(graph, order, handed_on.union(_makes_weights(graph)))


def settle(graph: Graph, order: Sequence[int], eager: bool) -> list[int]:
    """`order`, but what grows the live bytes as late, and what shrinks them as early as can be.

    Args:
        graph: The graph.
        order: An order of it.
        eager: Whether what shrinks them may run before what is due, as soon as it is ready.
    """
    emission = _Emission(graph)
    position = {i: k for k, i in enumerate(order)}
    grows = [
        sum(graph.sizes[t] for t in graph.outputs[i])
        > sum(graph.sizes[t] for t in set(graph.inputs[i]) if t in graph.maker)
        for i in range(len(graph))
    ]
    results = set(graph.results)
    last = [
        bool(results & set(made)) or not emission.after[i] for i, made in enumerate(graph.outputs)
    ]
    for i in order:
        if grows[i] and not last[i]:
            continue  # when something that does not grow needs it
        _emit_needed(emission, i, position, _shrinking(emission) if eager else None)
    for i in order:
        _emit_needed(emission, i, position)
    return emission.order


def _makes_weights(graph: Graph) -> list[int]:
    """The operators that use a training step's large tensors up."""
    names = {"ASSIGN_VARIABLE", "SCATTER_ND"}
    return [i for i, name in enumerate(graph.names) if name in names]


def _shrinking(emission: _Emission) -> Callable[[int], bool]:
    return lambda i: emission.growth(i) < 0


def _emit_needed(
    emission: _Emission,
    i: int,
    position: dict[int, int],
    at_once: Callable[[int], bool] | None = None,
) -> None:
    """Emit `i` after whatever it needs, that in the order of `position`.

    With `at_once`, also those that have become ready and of which it says so.
    """
    todo = [i]
    while todo:
        i = todo[-1]
        if emission.done[i]:
            todo.pop()
            continue
        missing = [j for j in emission.graph.before[i] if not emission.done[j]]
        if missing:
            todo += sorted(missing, key=position.__getitem__, reverse=True)
            continue
        todo.pop()
        newly = emission.emit(i)
        if at_once is not None:
            ready = [(position[j], j) for j in newly if at_once(j)]
            heapq.heapify(ready)
            while ready:
                _, j = heapq.heappop(ready)
                if not emission.done[j]:
                    for k in emission.emit(j):
                        if at_once(k):
                            heapq.heappush(ready, (position[k], k))


class _Emission:
    """An order in the making.

    Attributes:
        order: The operators so far.
        done: Whether each is among them.
        missing: How many of what must come first each still waits for.
        after: What waits for each.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order: list[int] = []
        self.done = [False] * len(graph)
        self.missing = [len(before) for before in graph.before]
        self.after: list[list[int]] = [[] for _ in range(len(graph))]
        for i, before in enumerate(graph.before):
            for j in before:
                self.after[j].append(i)
        self._readers: dict[int, int] = {}
        for read in graph.inputs:
            for t in set(read):
                self._readers[t] = self._readers.get(t, 0) + 1
        stays = graph.stays
        self._freed_last = [
            [t for t in set(read) if t in graph.maker and t not in stays] for read in graph.inputs
        ]

    def growth(self, i: int) -> int:
        """By how many live bytes there are more after `i` has run now."""
        sizes = self.graph.sizes
        made = sum(
            sizes[t] for t in self.graph.outputs[i] if t in self._readers or t in self.graph.results
        )
        return made - sum(sizes[t] for t in self._freed_last[i] if self._readers[t] == 1)

    def emit(self, i: int) -> list[int]:
        """Put `i` next; returns what has become ready by it."""
        self.order.append(i)
        self.done[i] = True
        for t in set(self.graph.inputs[i]):
            self._readers[t] -= 1
        for j in self.after[i]:
            self.missing[j] -= 1
        return [j for j in self.after[i] if not self.missing[j]]
