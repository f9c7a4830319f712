"""Tensors made again where they are needed, instead of kept until then.

What a backward pass needs of the forward pass is kept across the peak. Much of it can be made again
from what is kept anyway, bit for bit, by the operators that made it: an activation from the input
of the normalization before it, that from the convolution before. It is taken, one tensor at a time,
what frees most at the peak for the time it costs, as long as the peak falls (the greedy scheme of
XLA's HloRematerialization).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tflite_tools import cost
from tflite_tools import flatbuffer as fb
from tflite_tools.graph import Graph

# Operators to make one tensor again. Longer chains cost more than they are worth.
_LONGEST = 8
# Bytes of a tensor so small that it is kept instead.
_SMALL = 1 << 12


@dataclasses.dataclass
class _Step:
    """An operator of the step, or one of those again.

    Attributes:
        source: Which operator of the graph.
        inputs: The tensors it reads.
        outputs: The tensors it makes.
    """

    source: int
    inputs: list[int]
    outputs: list[int]


@dataclasses.dataclass(frozen=True)
class _Rebuilt:
    """How to do without a tensor for some time.

    Attributes:
        tensor: Which.
        at: Before which position it is made again.
        steps: The operators that make it, in order, by their numbers in the graph.
        longer: The tensors that are kept longer for them.
        freed: Bytes fewer at the peak.
        seconds: What they take.
    """

    tensor: int
    at: int
    steps: list[int]
    longer: list[int]
    freed: int
    seconds: float


class Rebuilding:
    """The operators of a graph, and what is made again before each of them.

    Args:
        graph: The graph; its operators stay in order.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps = [
            _Step(i, list(inputs), list(outputs))
            for i, (inputs, outputs) in enumerate(zip(graph.inputs, graph.outputs, strict=True))
        ]
        self.before: list[list[_Step]] = [[] for _ in self.steps]
        self.sizes = list(graph.sizes)
        #: Of each tensor made again, which it is.
        self.original: dict[int, int] = {}
        self._versions: dict[int, list[int]] = {}
        self.seconds = [cost.seconds(graph, i) for i in range(len(graph))]
        self._made: dict[int, int] = {}
        self._used: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            for t in step.outputs:
                self._made[t] = k
            for t in set(step.inputs):
                self._used.setdefault(t, []).append(k)
        self._live = np.array(list(graph.held(range(len(graph)))), np.int64)
        self._extra = np.zeros(len(graph), np.int64)

    def lower(self, seconds: float) -> None:
        """Rebuild what lowers the peak, for at most so many seconds."""
        while self.steps and (chosen := self._best(seconds)):
            self._apply(chosen)
            seconds -= chosen.seconds

    def order(self) -> list[_Step]:
        """All steps in order, but those whose outputs are now made again before they are read."""
        steps = [step for k, own in enumerate(self.steps) for step in (*self.before[k], own)]
        read = set(self.graph.results)
        needed = []
        for step in reversed(steps):
            if not cost.is_pure(self.graph, step.source) or read.intersection(step.outputs):
                read.update(step.inputs)
                needed.append(step)
        return needed[::-1]

    def _best(self, seconds: float) -> _Rebuilt | None:
        moments = self._live + self._extra
        at = int(moments.argmax())
        peak = int(moments[at])
        best, best_value = None, 0.0
        for t, made in self._made.items():
            if made >= at or t in self.graph.stays or self.sizes[t] <= _SMALL:
                continue
            used = self._used.get(t, ())
            later = [k for k in used if k > at]
            if not later or at in used:
                continue
            found = self._rebuilt(t, at, later[0])
            if found is None or found.seconds > seconds:
                continue
            value = found.freed / found.seconds
            if value > best_value and self._fits(found, peak):
                best, best_value = found, value
        return best

    def _rebuilt(self, tensor: int, peak: int, at: int) -> _Rebuilt | None:
        steps: list[int] = []
        longer: list[int] = []
        if not self._chain(tensor, at, steps, longer):
            return None
        ends = [self._last(t) for t in longer]
        kept = sum(self.sizes[t] for t, end in zip(longer, ends, strict=True) if end < peak)
        freed = self.sizes[tensor] - kept
        if freed <= 0:
            return None
        return _Rebuilt(tensor, at, steps, longer, freed, sum(self.seconds[i] for i in steps))

    def _chain(self, tensor: int, at: int, steps: list[int], longer: list[int]) -> bool:
        """Collect the operators that make `tensor` again at a position; False if there are none."""
        source = self.graph.maker.get(self.original.get(tensor, tensor))
        if source is None or not cost.is_pure(self.graph, source) or len(steps) >= _LONGEST:
            return False
        if len(self.graph.outputs[source]) > 1:
            return False  # what else it makes would be made in vain
        for t in set(self.graph.inputs[source]):
            if t in self.graph.stays or t not in self.graph.maker or self.sizes[t] == 0:
                continue
            if t in longer or self._version(t, at) is not None:
                continue
            if self.sizes[t] <= _SMALL:
                longer.append(t)
            elif self.graph.maker[t] not in steps and not self._chain(t, at, steps, longer):
                return False
        steps.append(source)
        return True

    def _version(self, tensor: int, at: int) -> int | None:
        """The tensor, or the same made again, that is there when a position is reached."""
        for version in (tensor, *self._versions.get(tensor, ())):
            if self._made[version] < at <= self._last(version):
                return version
        return None

    def _present(self, tensor: int, at: int) -> int:
        if tensor not in self._made:
            return tensor  # given, or a constant
        version = self._version(tensor, at)
        return tensor if version is None else version

    def _last(self, tensor: int) -> int:
        return max(self._used.get(tensor) or [self._made[tensor]])

    def _fits(self, found: _Rebuilt, peak: int) -> bool:
        """Whether no other moment becomes as high as the peak is."""
        change, first = self._changes(found)
        moments_at = self._live + self._extra
        moments = moments_at[first : found.at] + change
        if len(moments) and moments.max(initial=0, where=change > 0) >= peak:
            return False
        longer = self._kept_longer(found)
        live = int(self._live[found.at]) - self._own(found.at) + longer - self.sizes[found.tensor]
        for i in found.steps:
            live += sum(self.sizes[t] for t in self.graph.outputs[i])
            if live + self.graph.scratch[i] >= peak:
                return False
        return int(moments_at[found.at]) + longer < peak

    def _kept_longer(self, found: _Rebuilt) -> int:
        """The bytes of what would be gone when it is made again, and now is not."""
        return sum(self.sizes[t] for t in found.longer if self._last(t) < found.at)

    def _own(self, at: int) -> int:
        """The bytes an operator adds: its outputs, its scratch, and what is made again for it."""
        step = self.steps[at]
        again = sum(self.sizes[t] for t in self._again(at))
        return sum(self.sizes[t] for t in step.outputs) + self.graph.scratch[step.source] + again

    def _again(self, at: int) -> set[int]:
        """What is made again before an operator, and is still there when that runs."""
        made = {t for step in self.before[at] for t in step.outputs}
        return {t for t in made if self._made.get(t) == at}

    def _changes(self, found: _Rebuilt) -> tuple[np.ndarray, int]:
        """What changes before the position it is made again at, and from where on."""
        last = max([self._made[found.tensor], *self._uses_before(found)])
        ends = {t: self._last(t) for t in found.longer}
        first = min([last, *ends.values()]) + 1
        change = np.zeros(found.at - first, np.int64)
        change[last + 1 - first :] -= self.sizes[found.tensor]
        for t, end in ends.items():
            change[max(end + 1 - first, 0) :] += self.sizes[t]
        return change, first

    def _uses_before(self, found: _Rebuilt) -> list[int]:
        return [k for k in self._used[found.tensor] if k < found.at]

    def _apply(self, found: _Rebuilt) -> None:
        change, first = self._changes(found)
        self._live[first : found.at] += change
        self._live[found.at] += self._kept_longer(found)
        again: dict[int, int] = {}
        new = []
        for i in found.steps:
            inputs = [again.get(t, self._present(t, found.at)) for t in self.graph.inputs[i]]
            outputs = []
            for t in self.graph.outputs[i]:
                again[t] = len(self.sizes)
                self.original[again[t]] = t
                self.sizes.append(self.sizes[t])
                outputs.append(again[t])
            new.append(_Step(i, inputs, outputs))
        original = self.original.get(found.tensor, found.tensor)
        made = again[original]
        self._versions.setdefault(original, []).append(made)
        before = self._uses_before(found)
        after = [k for k in self._used[found.tensor] if k >= found.at]
        for k in after:
            for step in (*self.before[k], self.steps[k]):
                step.inputs = [made if t == found.tensor else t for t in step.inputs]
        self._used[found.tensor] = before
        self._used[made] = after
        self._made[made] = found.at
        for step in new:
            for t in step.inputs:
                if t not in again.values():
                    self._used.setdefault(t, []).append(found.at)
                    self._used[t] = sorted(set(self._used[t]))
        self.before[found.at] = [*new, *self.before[found.at]]
        self._extra[found.at] = self._most_before(found.at)

    def _most_before(self, at: int) -> int:
        """By how much the highest moment before an operator exceeds the operator's own."""
        steps, live = self.before[at], -self._own(at)
        last = {t: k for k, s in enumerate(steps) for t in (*s.inputs, *s.outputs)}
        inner = {t for s in steps for t in s.outputs} - self._again(at)
        most = 0
        for k, s in enumerate(steps):
            live += sum(self.sizes[t] for t in s.outputs)
            most = max(most, live + self.graph.scratch[s.source])
            live -= sum(self.sizes[t] for t in {*s.inputs, *s.outputs} & inner if last[t] == k)
        return most


def rebuild(model: schema.ModelT, number: int, time_budget: float) -> None:
    """Lower the peak of a subgraph in the order it has, by what is made again.

    Args:
        model: The model, which is changed.
        number: Of the subgraph.
        time_budget: The seconds it may take, by `cost`, as a ratio to those it takes now.
    """
    graph = Graph(model, number)
    rebuilding = Rebuilding(graph)
    rebuilding.lower((time_budget - 1) * sum(rebuilding.seconds))
    if not rebuilding.original:
        return
    subgraph = model.subgraphs[number]
    operators, tensors = subgraph.operators, list(subgraph.tensors)
    known = len(tensors)
    for t in sorted(rebuilding.original):
        tensor = copy.copy(tensors[rebuilding.original[t]])
        tensor.name = f"{fb.text(tensor.name)}/again_{t - known}".encode()
        tensors.append(tensor)
    kept = subgraph.operators, subgraph.tensors
    subgraph.tensors = tensors
    subgraph.operators = [_operator(operators[s.source], s) for s in rebuilding.order()]
    if Graph(model, number).peak().nbytes >= graph.peak().nbytes:
        # What was left out read what now stays, since nothing else reads it.
        subgraph.operators, subgraph.tensors = kept


def _operator(operator: schema.OperatorT, step: _Step) -> schema.OperatorT:
    again = copy.copy(operator)
    inputs: Iterable[int] = iter(step.inputs)
    read = [t if t < 0 else next(inputs) for t in fb.listed(operator.inputs)]
    again.inputs, again.outputs = np.array(read, np.int32), np.array(step.outputs, np.int32)
    return again
