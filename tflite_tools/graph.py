"""A subgraph as a graph: which operator must come before which, and how long tensors live."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from ai_edge_litert import schema_py_generated as schema

from tflite_tools import flatbuffer as fb

# Their outputs are not in the interpreter's arena, and never let go of.
_KEPT = {"READ_VARIABLE"}
_VARIABLES = {"VAR_HANDLE", "READ_VARIABLE", "ASSIGN_VARIABLE"}
_TABLES = {"HASHTABLE", "HASHTABLE_FIND", "HASHTABLE_IMPORT", "HASHTABLE_SIZE"}
#: Operators that draw random numbers.
RANDOM = {"RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL", "MULTINOMIAL"}
# Their last inputs are tensors that they change.
_STATEFUL = {
    *("UNIDIRECTIONAL_SEQUENCE_LSTM", "UNIDIRECTIONAL_SEQUENCE_RNN", "LSTM", "SVDF", "RNN"),
    *("BIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_RNN"),
}
#: Operators that read or change something beside their tensors.
STATE = _VARIABLES | _TABLES | RANDOM | _STATEFUL | {"CALL_ONCE"}


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a subgraph holds while one operator runs.

    Attributes:
        nbytes: Live bytes, the operator's own scratch memory included.
        position: Which operator, counted in the order given.
    """

    nbytes: int
    position: int


class Graph:
    """The operators of a subgraph, what each reads and makes, and what must come first.

    Attributes:
        names: The name of each operator.
        inputs: The tensors each reads.
        outputs: The tensors each makes.
        sizes: The bytes of each tensor that the interpreter has to find room for: none for
            constants, which are in the file, and for handles of variables.
        stays: The tensors that stay until the end once they are there.
        scratch: The bytes each operator takes for itself while it runs.
        before: The operators that must run before each: it reads what they make, or both touch
            the same state and change it.
    """

    def __init__(self, model: schema.ModelT, number: int = 0) -> None:
        self.model, self.number = model, number
        subgraph = model.subgraphs[number]
        ops = fb.listed(subgraph.operators)
        self.names = [fb.op_name(model, op) for op in ops]
        self.inputs = [[t for t in fb.listed(op.inputs) if t >= 0] for op in ops]
        self.outputs = [[t for t in fb.listed(op.outputs) if t >= 0] for op in ops]
        self.sizes = [
            0
            if tensor.type == schema.TensorType.RESOURCE or fb.is_constant(model, tensor)
            else fb.nbytes(tensor)
            for tensor in fb.listed(subgraph.tensors)
        ]
        self.given = fb.listed(subgraph.inputs)
        self.results = fb.listed(subgraph.outputs)
        self.maker = {t: i for i, made in enumerate(self.outputs) for t in made}
        self.scratch = [_scratch(model, subgraph, op, self.sizes) for op in ops]
        self.before = self._before(ops)
        read = {t for inputs in self.inputs for t in inputs}
        self.stays = {
            *self.given,
            *self.results,
            *(t for t, i in self.maker.items() if t not in read or self.names[i] in _KEPT),
        }

    def __len__(self) -> int:
        """How many operators."""
        return len(self.names)

    def operator(self, i: int) -> schema.OperatorT:
        """An operator as it is in the model."""
        return self.model.subgraphs[self.number].operators[i]

    def held(self, order: Sequence[int]) -> Iterator[int]:
        """Live bytes while each operator of `order` runs.

        Of the interpreter's memory planner: inputs and results stay, and so does what is read of
        variables, and what nothing reads; anything else is there from the operator that makes it to
        the last that reads it.
        """
        last = {t: i for i in order for t in (*self.inputs[i], *self.outputs[i])}
        stays = self.stays
        live = sum(self.sizes[t] for t in set(self.given))
        for i in order:
            live += sum(self.sizes[t] for t in self.outputs[i])
            yield live + self.scratch[i]
            touched = {*self.inputs[i], *self.outputs[i]} - stays
            live -= sum(self.sizes[t] for t in touched if last[t] == i and t in self.maker)

    def peak(self, order: Sequence[int] | None = None) -> Moment:
        """The most that is live at once, and when; in the order of the file by default."""
        held = list(self.held(range(len(self)) if order is None else order))
        nbytes = max(held, default=0)
        return Moment(nbytes, held.index(nbytes) if held else 0)

    def alive(self, position: int) -> list[int]:
        """The tensors alive while the operator at `position` of the file runs."""
        made = {*self.given, *(t for outputs in self.outputs[: position + 1] for t in outputs)}
        needed = {*self.results, *self.given}
        for touched in (*self.inputs[position:], *self.outputs[position:]):
            needed.update(touched)
        return sorted(t for t in made & needed if self.sizes[t])

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether `order` has every operator once, and none before what must come first."""
        position = {i: k for k, i in enumerate(order)}
        return sorted(order) == list(range(len(self))) and all(
            position[j] < position[i] for i in order for j in self.before[i]
        )

    def _before(self, ops: Sequence[schema.OperatorT]) -> list[set[int]]:
        before = [{self.maker[t] for t in read if t in self.maker} for read in self.inputs]
        readers: dict[str, list[int]] = {}
        writer: dict[str, int] = {}
        for i, op in enumerate(ops):
            reads, writes = self._state(i, op)
            for state in reads | writes:
                if state in writer:
                    before[i].add(writer[state])
            for state in writes:
                before[i].update(readers.pop(state, ()))
                writer[state] = i
            for state in reads - writes:
                readers.setdefault(state, []).append(i)
        for i, needed in enumerate(before):
            needed.discard(i)
        return before

    def _state(self, i: int, op: schema.OperatorT) -> tuple[set[str], set[str]]:
        """The state an operator reads, and that which it changes. Everything reads "all"."""
        name = self.names[i]
        if name == "VAR_HANDLE":
            return {"all"}, set()
        if name in ("READ_VARIABLE", "ASSIGN_VARIABLE"):
            variable = f"variable {self._variable(i)}"
            # Writing to it comes between two changes of everything, as reading does.
            return ({"all", variable}, set()) if name == "READ_VARIABLE" else ({"all"}, {variable})
        if name in _TABLES:
            return {"all"}, {"tables"}
        if name in RANDOM:
            return {"all"}, {"random"}
        if self._has_effects(i, op):
            # Whatever it does, nothing that touches state may pass it.
            states = {"tables", "random"}
            states.update(
                f"variable {self._variable(k)}"
                for k, other in enumerate(self.names)
                if other in ("READ_VARIABLE", "ASSIGN_VARIABLE")
            )
            return set(), {"all", *states}
        return set(), set()

    def _variable(self, i: int) -> str:
        """The variable a read or an assignment is of."""
        handle = self.inputs[i][0]
        maker = self.maker.get(handle)
        if maker is None or self.names[maker] != "VAR_HANDLE":
            return f"in tensor {handle}"
        options = self.model.subgraphs[self.number].operators[maker].builtinOptions
        return f"{fb.text(options.container)}/{fb.text(options.sharedName)}"

    def _has_effects(self, i: int, op: schema.OperatorT) -> bool:
        name = self.names[i]
        if name == "CALL_ONCE" or name in _STATEFUL or fb.is_custom(self.model, op):
            return True
        return any(_touches_state(self.model, number, set()) for number in _called(self.model, op))


def _called(model: schema.ModelT, op: schema.OperatorT) -> list[int]:
    """The subgraphs that an operator runs."""
    options = op.builtinOptions
    fields = ("thenSubgraphIndex", "elseSubgraphIndex", "condSubgraphIndex", "bodySubgraphIndex")
    numbers = [getattr(options, field) for field in fields if hasattr(options, field)]
    if fb.op_name(model, op) == "CALL":
        numbers.append(options.subgraph)
    return numbers


def _touches_state(model: schema.ModelT, number: int, seen: set[int]) -> bool:
    if number in seen or not 0 <= number < len(model.subgraphs):
        return False
    seen.add(number)
    return any(
        fb.op_name(model, op) in STATE
        or fb.is_custom(model, op)
        or any(_touches_state(model, called, seen) for called in _called(model, op))
        for op in fb.listed(model.subgraphs[number].operators)
    )


def _scratch(
    model: schema.ModelT,
    subgraph: schema.SubGraphT,
    op: schema.OperatorT,
    sizes: Sequence[int],
) -> int:
    """What the reference kernels take beside inputs and outputs."""
    name = fb.op_name(model, op)
    inputs, outputs = fb.listed(op.inputs), fb.listed(op.outputs)
    if name == "CONV_2D":
        # The patches under the kernel, as rows of a matrix; a 1x1 kernel needs none.
        kernel = fb.listed(subgraph.tensors[inputs[1]].shape)
        output = fb.listed(subgraph.tensors[outputs[0]].shape)
        options = op.builtinOptions
        if len(kernel) != 4 or len(output) != 4:
            return 0
        if kernel[1:3] == [1, 1] and options.strideH == options.strideW == 1:
            return 0
        batch, height, width, _ = (max(size, 1) for size in output)
        return batch * height * width * kernel[1] * kernel[2] * kernel[3] * 4
    if name == "BATCH_MATMUL":
        return sum(sizes[t] for t in inputs)  # transposed
    return 0
