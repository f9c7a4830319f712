"""The planner's problem, read from a traced step and the ledger of its forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from bittrain_tf import native, planning, recipes
from bittrain_tf.analysis.cost import MEMORY, is_product, operations_seconds
from bittrain_tf.analysis.graph import VIEWS, StepGraph, key, needed
from bittrain_tf.analysis.liveness import Densities, live_bytes, original, tensor_bytes
from bittrain_tf.analysis.tracing import TracedStep
from bittrain_tf.ledger import Gradient, Inside, Ledger, Offer
from bittrain_tf.recipes import Derived, Encoded

# Passes over a tensor that encoding it and decoding it take, with the native kernels and
# with TensorFlow operations (benchmarks/codec.py).
_CODEC_PASSES, _SLOW_CODEC_PASSES = 5, 60


def read_problem(
    step: TracedStep, entries: Ledger, groups: Mapping[int, str], densities: Densities
) -> planning.Problem:
    """The problem of a step traced with every layer keeping its output.

    Args:
        step: The step.
        entries: The ledger that was open meanwhile.
        groups: A name of its own for each layer, by `id`.
        densities: The densities of what is encoded.
    """
    return _Reader(step, entries, groups, densities).read()


class _Reader:
    def __init__(
        self, step: TracedStep, entries: Ledger, groups: Mapping[int, str], densities: Densities
    ) -> None:
        self._step, self._entries, self._groups = step, entries, groups
        self._densities = densities
        self._data = {key(t) for t in step.data}
        self._tensors: list[planning.Tensor] = []
        self._indices: dict[int, int] = {}
        graph = StepGraph(step.graph, step.data, step.seed, step.gradients)
        self._kept = {key(t): self._bytes(t) for t, _ in graph.kept()}

    def read(self) -> planning.Problem:
        taken = [entry for entry in self._entries.steps if entry.begun is not None]
        taken.sort(key=lambda entry: -entry.begun)  # as the forward pass goes
        steps = [
            planning.Step(
                tuple(dict.fromkeys(self._inside(e) if isinstance(e, Inside) else self._reads(e)))
            )
            for e in taken
        ]
        problem = planning.Problem(tuple(self._tensors), tuple(steps))
        try:
            played = planning.play(problem, frozenset())
        except planning.TooDeepError:
            raise ValueError(
                "The model cannot be planned for: more layers than can be followed stand in a row "
                "that keep nothing of their own (views, normalization). Leave some of them out "
                "with filters."
            ) from None
        operations = needed(self._step.graph, self._step.gradients)
        seconds = operations_seconds(operations, self._densities)
        return planning.Problem(
            problem.tensors,
            tuple(self._with_gradients(steps, taken, played)),
            max(0.0, seconds - played.seconds),
        )

    def _with_gradients(
        self,
        steps: Sequence[planning.Step],
        taken: Sequence[Gradient | Inside],
        played: planning.Backward,
    ) -> Iterator[planning.Step]:
        """`steps` with what is alive besides tensors: whatever else is, in the step traced."""
        numbers = {op.name: i for i, op in enumerate(self._step.graph.get_operations())}
        live = [
            (numbers[op.name], nbytes)
            for op, nbytes in live_bytes(self._step.graph, self._step.gradients, self._densities)
        ]
        ends = [len(numbers), *(entry.begun for entry in taken)]
        for i, (step, entry, end) in enumerate(zip(steps, taken, ends, strict=False)):
            during = [nbytes for number, nbytes in live if entry.begun <= number < end] or [0]
            arriving = during[0] - (played.alive[i] - played.rebuilt[i])
            working = max(during) - played.alive[i]
            yield dataclasses.replace(
                step, arriving_bytes=max(0, arriving), working_bytes=max(0, working)
            )

    def _reads(self, entry: Gradient) -> list[int]:
        found = []
        for kept in entry.kept:
            tensor = self._entries.tensors.get(id(kept))
            found += map(self._part, kept.parts) if tensor is None else [self._tensor(tensor)]
        return found

    def _inside(self, entry: Inside) -> list[int]:
        """Its intermediate tensors are kept together or rebuilt together, as if they were one."""
        operations = self._between([entry.y], entry.inputs)
        nbytes = sum(self._kept.get(key(t), 0) for op in operations for t in op.outputs)
        sources = tuple(self._tensor(t) for t in entry.inputs if not self._is_weight(t))
        index = self._add(
            planning.Tensor(
                nbytes,
                nbytes,
                sources=sources,
                rebuilt_seconds=operations_seconds(operations, self._densities),
                group=self._groups[id(entry.layer)],
                is_product=True,
            )
        )
        return [*sources, index]

    def _tensor(self, x: tf.Tensor) -> int:
        """The index of a tensor that may be kept or rebuilt."""
        if id(x) in self._indices:
            return self._indices[id(x)]
        offer, recipe = self._entries.offers.get(id(x)), recipes.of(x)
        if offer is not None:
            tensor = self._offered(offer)
        elif isinstance(recipe, Derived):
            tensor = self._rebuilt(x, recipe.sources, None)
        elif isinstance(recipe, Encoded):
            tensor = self._encoded(x)
        else:
            there = self._is_weight(x) or key(original(x)) in self._data
            tensor = planning.Tensor(self._bytes(x), 0 if there else self._bytes(x))
        self._indices[id(x)] = self._add(tensor)
        return self._indices[id(x)]

    def _part(self, part: tf.Tensor) -> int:
        """The index of a packed mask, or whatever else is kept as it is."""
        if id(part) not in self._indices:
            nbytes = self._bytes(part)
            self._indices[id(part)] = self._add(planning.Tensor(nbytes, nbytes))
        return self._indices[id(part)]

    def _offered(self, offer: Offer) -> planning.Tensor:
        tensor = self._rebuilt(offer.y, offer.sources, self._groups[id(offer.layer)])
        kept = self._encoded(offer.y) if isinstance(offer.kept, Encoded) else tensor
        return dataclasses.replace(
            tensor, kept_bytes=kept.kept_bytes, kept_seconds=kept.kept_seconds
        )

    def _rebuilt(
        self, y: tf.Tensor, sources: Sequence[tf.Tensor], group: str | None
    ) -> planning.Tensor:
        operations = self._between([y], sources)
        nbytes = self._bytes(y)
        return planning.Tensor(
            nbytes,
            nbytes if group is not None else 0,
            sources=tuple(self._tensor(t) for t in sources if not self._is_weight(t)),
            rebuilt_seconds=operations_seconds(operations, self._densities),
            group=group,
            is_product=any(map(is_product, operations)),
        )

    def _encoded(self, x: tf.Tensor) -> planning.Tensor:
        nbytes = self._bytes(x)
        passes = _CODEC_PASSES if native.available() else _SLOW_CODEC_PASSES
        return planning.Tensor(
            nbytes,
            # The bitmap is often a mask that is kept in any case; one bit an element.
            int(nbytes * self._densities.of(x)) + nbytes // (8 * x.dtype.size),
            kept_seconds=passes * nbytes / MEMORY,
        )

    def _add(self, tensor: planning.Tensor) -> int:
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def _between(self, ys: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """The operations by which `ys` are computed from `inputs`."""
        inside = [t for t in inputs if tf.is_symbolic_tensor(t)]
        stop = {key(original(t)) for t in inside} | {key(t) for t in inside}
        found: dict[str, tf.Operation] = {}
        left = list(ys)
        while left:
            tensor = left.pop()
            if key(tensor) in stop or tensor.op.name in found:
                continue
            if tensor.op.type == "IdentityN":  # of several tensors, this one only
                left.append(tensor.op.inputs[tensor.value_index])
                continue
            found[tensor.op.name] = tensor.op
            left += tensor.op.inputs
        return [op for op in found.values() if op.type not in VIEWS]

    @staticmethod
    def _is_weight(x: tf.Tensor) -> bool:
        if not tf.is_symbolic_tensor(x):
            return True  # a constant or variable from outside
        while x.op.type in ("Cast", "Identity", "Reshape"):
            x = x.op.inputs[0]
        return x.op.type in ("Const", "ReadVariableOp") or x.dtype == tf.resource

    def _bytes(self, x: tf.Tensor) -> int:
        return tensor_bytes(x, self._densities)
