"""Choosing what to keep and what to rebuild. Numbers only: nothing of TensorFlow in here.

A `Problem` lists the tensors a backward pass needs and, in the order of the forward
pass, the gradients that need them. A plan is the set of groups (layers) whose tensors
are rebuilt. `evaluate` plays the backward pass through and says how many bytes are
alive at its peak and how many seconds are spent on rebuilding. `frontier` finds plans
that trade one for the other.

For a price on bytes, the plan of the lowest sum of time and priced bytes is a minimum
cut (as in PyTorch's min-cut rematerialization, here with a cost for rebuilding), so a
range of prices gives the plans on the convex hull of kept bytes and time, exactly.
The peak is not a sum over tensors: of these plans, and of those that one change leads
to, the ones no other beats are kept. Few groups are simply tried in every combination.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Sequence, Set

# The clocks of `recipes.Kept`: for how many gradients a rebuilt tensor waits for a reader.
SHARED_FOR, PRODUCT_SHARED_FOR = 1, 16

_TRIED_IN_EVERY_COMBINATION = 10
_PRICES = 32
# How many tensors to play through in search of better plans, and plans at least.
_TENSORS_PLAYED, _FEWEST_CHANGES = 500_000, 30
_PASSES, _STARTS = 2, 3
_SEGMENTS = (2, 4, 8, 16, 32, 64)
_DEEPEST = 100


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor that a gradient may need.

    Attributes:
        nbytes: Its size, dense.
        kept_bytes: What keeping it takes: 0 if it is there in any case, less than `nbytes`
            if it is encoded.
        kept_seconds: What encoding and decoding it takes.
        sources: The tensors it can be rebuilt from, by index; each comes before it.
        rebuilt_seconds: What that takes, the sources being there.
        group: The group whose choice decides; None if there is no choice: it is then
            rebuilt if it has sources, else kept.
        is_product: Whether rebuilding it takes a convolution or a matrix product.
    """

    nbytes: int
    kept_bytes: int
    kept_seconds: float = 0.0
    sources: tuple[int, ...] = ()
    rebuilt_seconds: float = 0.0
    group: str | None = None
    is_product: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A gradient.

    Attributes:
        reads: The tensors it needs, by index.
        arriving_bytes: What is alive besides tensors as it begins: gradients.
        working_bytes: What is alive besides tensors, at most, while it runs.
    """

    reads: tuple[int, ...]
    arriving_bytes: int = 0
    working_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Problem:
    """What there is to choose.

    Attributes:
        tensors: All tensors, sources before what is computed from them.
        steps: All gradients, in the order of the forward pass.
        seconds: What a step takes if nothing is encoded or rebuilt.
    """

    tensors: tuple[Tensor, ...]
    steps: tuple[Step, ...]
    seconds: float = 0.0

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups to choose for, in the order of the forward pass."""
        return tuple(dict.fromkeys(t.group for t in self.tensors if t.group is not None))


@dataclasses.dataclass(frozen=True)
class Point:
    """A plan and what it comes to.

    Attributes:
        rebuilt: The groups that are rebuilt; the others are kept.
        peak_bytes: The most bytes alive at any time of the backward pass.
        seconds: What a step takes.
    """

    rebuilt: frozenset[str]
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward pass of a plan, played through; lists have an item for each step.

    Attributes:
        alive: The bytes of the tensors that are kept, or rebuilt and held, during the step.
        rebuilt: Of these, the bytes rebuilt for this step.
        passing: The bytes of what is rebuilt only to rebuild others from, at most.
        rebuilds: How many times a tensor is rebuilt or decoded.
        seconds: What encoding, decoding and rebuilding take.
    """

    alive: list[int]
    rebuilt: list[int]
    passing: list[int]
    rebuilds: int
    seconds: float


class TooDeepError(Exception):
    """A plan that would exhaust Python's stack, here and when the gradients are written."""


def evaluate(problem: Problem, rebuilt: Iterable[str]) -> Point:
    """What a plan comes to."""
    rebuilt = frozenset(rebuilt)
    try:
        played = play(problem, rebuilt)
    except TooDeepError:
        return Point(rebuilt, sys.maxsize, math.inf)
    peak = 0
    for number, step in enumerate(problem.steps):
        inside = max(step.working_bytes, step.arriving_bytes + played.passing[number])
        peak = max(peak, played.alive[number] + inside)
    return Point(rebuilt, peak, problem.seconds + played.seconds)


def play(problem: Problem, rebuilt: Set[str]) -> Backward:
    """Play the backward pass of a plan through, as `recipes.Kept` will do.

    Raises:
        TooDeepError: If a tensor is rebuilt from ones rebuilt in turn, and so on.
    """
    tensors, count = problem.tensors, len(problem.steps)
    is_kept = [not t.sources or (t.group is not None and t.group not in rebuilt) for t in tensors]
    kept_until: dict[int, int] = {}  # of each tensor kept, the last step that needs it
    since: dict[int, int] = {}  # of each tensor rebuilt, the step that it was rebuilt for
    until: dict[int, int] = {}  # and the last step that it is held for
    spans: list[tuple[int, int, int]] = []
    seconds = 0.0

    def need(index: int, step: int, depth: int = 0) -> None:
        nonlocal seconds
        if depth > _DEEPEST:
            raise TooDeepError
        tensor = tensors[index]
        if is_kept[index]:
            kept_until[index] = step
            if not tensor.kept_seconds:
                return  # kept as it is
        held_for = PRODUCT_SHARED_FOR if tensor.is_product and not is_kept[index] else SHARED_FOR
        if index in since:
            if since[index] - step <= held_for:
                until[index] = step
                return
            spans.append((index, since.pop(index), until.pop(index)))
        for source in () if is_kept[index] else tensor.sources:
            need(source, step, depth + 1)
        seconds += tensor.kept_seconds if is_kept[index] else tensor.rebuilt_seconds
        since[index] = until[index] = step

    for step in range(count - 1, -1, -1):
        for index in problem.steps[step].reads:
            need(index, step)
    spans += [(index, since[index], until[index]) for index in since]

    changes = [0] * (count + 1)
    rebuilt_bytes, passing = [0] * count, [0] * count
    reads = [set(step.reads) for step in problem.steps]
    passes = {(i, begin) for i, begin, end in spans if begin == end and i not in reads[begin]}
    for index, begin, end in spans:
        if (index, begin) not in passes:
            rebuilt_bytes[begin] += tensors[index].nbytes
            _add(changes, tensors[index].nbytes, begin, end)
        from_passing = (s for s in tensors[index].sources if (s, begin) in passes)
        nbytes = sum(tensors[s].nbytes for s in from_passing)
        passing[begin] = max(passing[begin], nbytes)
    for index, end in kept_until.items():
        _add(changes, tensors[index].kept_bytes, count - 1, end)
    alive = list(itertools.accumulate(reversed(changes[:count])))[::-1]
    return Backward(alive, rebuilt_bytes, passing, len(spans), seconds)


def _add(changes: list[int], nbytes: int, begin: int, end: int) -> None:
    """Enter bytes alive from step `begin` back to step `end`."""
    changes[begin] += nbytes
    changes[end - 1] -= nbytes  # for step 0, the item after the last, which nobody reads


def frontier(problem: Problem) -> tuple[Point, ...]:
    """Plans of which none needs both less memory and less time than another.

    Returns:
        The plans, from the quickest to the one of the lowest peak.
    """
    groups = problem.groups
    if len(groups) <= _TRIED_IN_EVERY_COMBINATION:
        plans: list[frozenset[str]] = [
            frozenset(chosen)
            for count in range(len(groups) + 1)
            for chosen in itertools.combinations(groups, count)
        ]
    else:
        corners = list(dict.fromkeys([frozenset(), *_cuts(problem), frozenset(groups)]))
        # As in Chen et al. (2016): in a chain of layers all alike a cut is all or nothing.
        segments = [frozenset(groups) - {*groups[::length]} for length in _SEGMENTS]
        plans = [*corners, *segments, *_between(problem, corners)]
    points = undominated(evaluate(problem, plan) for plan in dict.fromkeys(plans))
    return undominated([*points, *_below(problem, points[-1])])


def _between(problem: Problem, corners: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """The plans on the way from each of `corners` to the next, one group more at a time."""
    prices = _prices_of_groups(problem)
    plans = []
    for corner, following in itertools.pairwise(corners):
        plan = corner
        for group in sorted(following - corner, key=lambda g: (prices[g], g))[:-1]:
            plan |= {group}
            plans.append(plan)
    return plans[:: 1 + len(plans) // _changes_tried(problem)]


def _changes_tried(problem: Problem) -> int:
    """How many plans to try of a kind: playing one through takes time by the tensor rebuilt."""
    try:
        longest = play(problem, frozenset(problem.groups)).rebuilds
    except TooDeepError:
        longest = _DEEPEST * len(problem.steps)
    return max(_FEWEST_CHANGES, _TENSORS_PLAYED // max(1, longest))


def _below(problem: Problem, point: Point) -> list[Point]:
    """Plans of ever lower peaks, each a change of one group away from the last."""
    found = []
    largest = sorted(problem.tensors, key=lambda t: -t.nbytes)
    groups = list(dict.fromkeys(t.group for t in largest if t.group is not None))
    for group in (groups * _PASSES)[: _changes_tried(problem)]:
        changed = evaluate(problem, point.rebuilt ^ {group})
        if changed.peak_bytes < point.peak_bytes:
            point = changed
            found.append(point)
    return found


def undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """`points` without those that another beats, the quickest first."""
    best: list[Point] = []
    possible = (p for p in points if p.seconds < math.inf)
    for point in sorted(possible, key=lambda p: (p.seconds, p.peak_bytes, len(p.rebuilt))):
        if not best or point.peak_bytes < best[-1].peak_bytes:
            best.append(point)
    return tuple(best)


def cheapest(problem: Problem, points: Sequence[Point], peak_bytes: int) -> Point | None:
    """The quickest plan found whose peak is within `peak_bytes`; None if there is none.

    Args:
        problem: The problem.
        points: Its frontier.
        peak_bytes: The bytes allowed.
    """
    fitting = [point for point in points if point.peak_bytes <= peak_bytes]
    spare = _costs(problem)
    found = []
    for point in sorted(fitting, key=lambda p: p.seconds)[:_STARTS]:
        for group in sorted(point.rebuilt, key=lambda g: (-spare[g], g))[: _changes_tried(problem)]:
            without = evaluate(problem, point.rebuilt - {group})
            if without.peak_bytes <= peak_bytes and without.seconds < point.seconds:
                point = without
        found.append(point)
    return min(found, key=lambda p: p.seconds, default=None)


def smallest(problem: Problem, points: Sequence[Point], seconds: float) -> Point | None:
    """The plan found of the lowest peak that takes no more than `seconds`; None if none does.

    Args:
        problem: The problem.
        points: Its frontier.
        seconds: The time allowed.
    """
    fitting = [point for point in points if point.seconds <= seconds]
    if not fitting:
        return None
    point = min(fitting, key=lambda p: p.peak_bytes)
    costs = _costs(problem)
    others = [group for group in problem.groups if group not in point.rebuilt]
    for group in sorted(others, key=lambda g: (costs[g], g))[: _changes_tried(problem)]:
        further = evaluate(problem, point.rebuilt | {group})
        if further.seconds <= seconds and further.peak_bytes < point.peak_bytes:
            point = further
    return point


def _costs(problem: Problem) -> dict[str, float]:
    costs: dict[str, float] = {}
    for tensor in problem.tensors:
        if tensor.group is not None:
            costs[tensor.group] = costs.get(tensor.group, 0.0) + tensor.rebuilt_seconds
    return costs


def _prices_of_groups(problem: Problem) -> dict[str, float]:
    """For each group the seconds that rebuilding costs, a byte that it saves."""
    saved: dict[str, int] = {}
    for tensor in problem.tensors:
        if tensor.group is not None:
            saved[tensor.group] = saved.get(tensor.group, 0) + tensor.kept_bytes
    return {g: cost / max(1, saved[g]) for g, cost in _costs(problem).items()}


def _cuts(problem: Problem) -> list[frozenset[str]]:
    """The plans that are best for some price of a byte."""
    seconds = [t.rebuilt_seconds for t in problem.tensors if t.group is not None]
    sizes = [t.kept_bytes for t in problem.tensors if t.group is not None and t.kept_bytes]
    if not sizes or not any(seconds):
        return []
    mean = math.fsum(seconds) / sum(sizes)
    prices = [mean * 10.0 ** (exponent / 8 - 2) for exponent in range(_PRICES)]
    return [_cut(problem, price) for price in prices]


def _cut(problem: Problem, price: float) -> frozenset[str]:
    """The groups rebuilt in the plan of the lowest time plus `price` times kept bytes.

    Every tensor is two nodes. A cut between them keeps it; a cut between the source of
    the flow and the first rebuilds it. What a tensor is rebuilt from must itself be kept
    or rebuilt: edges without limit lead from the sources' second nodes to its first, and
    from the second nodes of what gradients read to the sink.
    """
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    tensors = problem.tensors
    start, sink = 2 * len(tensors), 2 * len(tensors) + 1
    edges: dict[tuple[int, int], float] = {}
    for index, tensor in enumerate(tensors):
        first, second = 2 * index, 2 * index + 1
        fixed = tensor.group is None or not tensor.sources
        keep = price * tensor.kept_bytes + tensor.kept_seconds
        edges[first, second] = math.inf if fixed and tensor.sources else keep
        edges[start, first] = math.inf if fixed and not tensor.sources else tensor.rebuilt_seconds
        for source in tensor.sources:
            edges[2 * source + 1, first] = math.inf
    for step in problem.steps:
        for index in step.reads:
            edges[2 * index + 1, sink] = math.inf
    limit = 2**30
    largest = max((c for c in edges.values() if c < math.inf), default=1.0) or 1.0
    total = math.fsum(c for c in edges.values() if c < math.inf) or largest
    unit = total / (limit // 2)
    capacities = [limit if c == math.inf else math.ceil(c / unit) for c in edges.values()]
    rows, columns = zip(*edges, strict=True)
    graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(graph, start, sink).flow
    residual = csr_array((graph - flow).maximum(0))
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, start, return_predecessors=False).tolist())
    return frozenset(
        t.group
        for i, t in enumerate(tensors)
        if t.group is not None and t.sources and 2 * i not in reached
    )
