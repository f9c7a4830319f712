"""Orders of operators: always valid, never worse, and the file still computes the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from ai_edge_litert import interpreter as litert
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

import tflite_tools
from tflite_tools import flatbuffer, orders
from tflite_tools.graph import Graph

BATCH, SIZE, CHANNELS, DEPTH = 2, 16, 8, 6


class Steps(tf.Module):
    """Gradient descent on a stack of 1x1 convolutions, written with what TFLite has."""

    def __init__(self):
        rng = np.random.default_rng(0)
        scale = CHANNELS**-0.5
        self.kernels = [
            tf.Variable(rng.normal(0, scale, (CHANNELS, CHANNELS)).astype(np.float32))
            for _ in range(DEPTH)
        ]

    @tf.function(input_signature=[tf.TensorSpec((BATCH * SIZE * SIZE, CHANNELS))])
    def train(self, x):
        inputs, outputs = [], []
        for kernel in self.kernels:
            inputs.append(x)
            x = tf.nn.relu(tf.matmul(x, kernel))
            outputs.append(x)
        loss = tf.reduce_mean(x**2)
        dx = 2 * x / tf.cast(tf.size(x), tf.float32)
        for kernel, read, made in zip(
            reversed(self.kernels), reversed(inputs), reversed(outputs), strict=True
        ):
            dx *= tf.cast(made > 0, tf.float32)
            dw = tf.matmul(read, dx, transpose_a=True)
            dx = tf.matmul(dx, kernel, transpose_b=True)
            kernel.assign_sub(0.1 * dw)
        return {"loss": loss}

    @tf.function(input_signature=[tf.TensorSpec((1,))])
    def weights(self, x):
        return {"weights": tf.stack([tf.convert_to_tensor(k) for k in self.kernels]) + 0 * x}


@pytest.fixture(scope="module")
def trainable(tmp_path_factory):
    path = tmp_path_factory.mktemp("schedule") / "steps.tflite"
    steps = Steps()
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [steps.train.get_concrete_function(), steps.weights.get_concrete_function()], steps
    )
    converter.experimental_enable_resource_variables = True
    path.write_bytes(converter.convert())
    return path


def train(path, steps=5):
    interpreter = litert.Interpreter(str(path))
    signatures = interpreter.get_signature_list()
    name = next(name for name in signatures if signatures[name]["outputs"] == ["loss"])
    other = next(name for name in signatures if signatures[name]["outputs"] != ["loss"])
    run = interpreter.get_signature_runner(name)
    x = np.random.default_rng(1).normal(size=(BATCH * SIZE * SIZE, CHANNELS)).astype(np.float32)
    losses = [float(run(**{signatures[name]["inputs"][0]: x})["loss"]) for _ in range(steps)]
    get = interpreter.get_signature_runner(other)
    return losses, get(**{signatures[other]["inputs"][0]: np.zeros(1, np.float32)})["weights"]


def test_the_same_numbers_in_less_memory(trainable, tmp_path):
    scheduled = tflite_tools.schedule(trainable, tmp_path / "scheduled.tflite")
    losses, weights = train(trainable)
    assert losses[-1] < losses[0]
    again, weights_again = train(tmp_path / "scheduled.tflite")
    assert again == losses
    assert np.array_equal(weights_again, weights)
    assert all(s.after <= s.before for s in scheduled)
    largest = max(scheduled, key=lambda s: s.operators)
    assert largest.after < largest.before


def test_nothing_is_overwritten(trainable, tmp_path):
    there = tmp_path / "there.tflite"
    there.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        tflite_tools.schedule(trainable, there)
    assert there.read_bytes() == b"mine"
    tflite_tools.schedule(trainable, there, overwrite=True)
    train(there, steps=1)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, -100])
def test_a_truncated_file(trainable, tmp_path, keep):
    broken = tmp_path / "broken.tflite"
    broken.write_bytes(trainable.read_bytes()[:keep])
    with pytest.raises(tflite_tools.FileFormatError, match=r"broken\.tflite"):
        tflite_tools.schedule(broken, tmp_path / "out.tflite")
    assert not (tmp_path / "out.tflite").exists()


def test_a_file_of_another_kind(tmp_path):
    other = tmp_path / "other.tflite"
    other.write_bytes(b"PK\x03\x04 something else altogether")
    with pytest.raises(tflite_tools.FileFormatError, match=r"not a \.tflite file"):
        tflite_tools.schedule(other, tmp_path / "out.tflite")


def a_model(ops, sizes):
    """A subgraph of additions: each reads some tensors and makes one; tensor 0 is the input."""
    model = schema.ModelT()
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD_N
    model.operatorCodes, model.buffers = [code], [schema.BufferT()]
    subgraph = schema.SubGraphT()
    subgraph.tensors = []
    for size in sizes:
        tensor = schema.TensorT()
        tensor.shape, tensor.type, tensor.buffer = np.array([size], np.int32), 0, 0
        subgraph.tensors.append(tensor)
    subgraph.operators = []
    for reads, made in ops:
        op = schema.OperatorT()
        op.opcodeIndex, op.inputs, op.outputs = 0, np.array(reads), np.array([made])
        subgraph.operators.append(op)
    subgraph.inputs, subgraph.outputs = np.array([0]), np.array([len(sizes) - 1])
    model.subgraphs = [subgraph]
    return model


@st.composite
def models(draw):
    count = draw(st.integers(1, 12))
    sizes = draw(st.lists(st.integers(1, 9), min_size=count + 1, max_size=count + 1))
    ops = [
        (draw(st.lists(st.integers(0, k), min_size=1, max_size=3, unique=True)), k + 1)
        for k in range(count)
    ]
    return a_model(ops, sizes)


@settings(deadline=None)
@given(models())
def test_any_graph(model):
    graph = Graph(model)
    order = orders.lowest(graph)
    assert graph.is_order(order)
    assert graph.peak(order).nbytes <= graph.peak().nbytes
    for other in (orders.greedy(graph), orders.settle(graph, order, eager=True)):
        assert graph.is_order(other)


def test_thousands_of_operators():
    """A training step of 1500 layers: forward values wait for their gradients."""
    depth = 1500
    ops = [([k], k + 1) for k in range(depth)]
    ops += [([depth + k, depth - k], depth + k + 1) for k in range(depth)]
    graph = Graph(a_model(ops, [4] * (2 * depth + 1)))
    order = orders.lowest(graph)
    assert graph.is_order(order)


def test_state_keeps_its_order(trainable):
    model = flatbuffer.read(trainable)
    for number in range(len(model.subgraphs)):
        graph = Graph(model, number)
        order = orders.lowest(graph)
        position = {i: k for k, i in enumerate(order)}
        for i, name in enumerate(graph.names):
            for j in range(i):
                touched = {name, graph.names[j]}
                if "CALL_ONCE" in touched and touched & {"READ_VARIABLE", "ASSIGN_VARIABLE"}:
                    assert position[j] < position[i]


def test_reads_and_writes_of_a_variable_keep_their_order(trainable, tmp_path):
    """Seen in the files, not by what the scheduler takes for the order."""
    scheduled = tmp_path / "scheduled.tflite"
    tflite_tools.schedule(trainable, scheduled)
    before, after = (state_by_variable(path) for path in (trainable, scheduled))
    assert any("ASSIGN_VARIABLE" in uses for uses in before.values())
    assert before == after


def state_by_variable(path):
    model = flatbuffer.read(path)
    uses = {}
    for number in range(len(model.subgraphs)):
        graph = Graph(model, number)
        for name, inputs in zip(graph.names, graph.inputs, strict=True):
            if name in ("READ_VARIABLE", "ASSIGN_VARIABLE"):
                handle = model.subgraphs[number].operators[graph.maker[inputs[0]]].builtinOptions
                uses.setdefault((number, handle.sharedName), []).append(name)
    return uses


def test_delegates_are_told_to_keep_the_order(tmp_path):
    """By the metadata TensorFlow Lite reads: version 1, one subgraph, two edges: 0 to 1, 1 to 2."""
    source, scheduled = tmp_path / "chain.tflite", tmp_path / "scheduled.tflite"
    flatbuffer.write(a_model([([0], 1), ([1], 2), ([2], 3)], [1, 1, 1, 1]), source)
    for _ in range(2):  # scheduled again, there is still one list
        tflite_tools.schedule(source, scheduled, overwrite=True)
        model = flatbuffer.read(scheduled)
        (metadata,) = model.metadata
        assert metadata.name == b"model_control_dependencies"
        assert bytes(model.buffers[metadata.buffer].data) == bytes([1, 1, 2, 0, 2, 2, 4])
        source = scheduled


def test_an_assignment_stays_between_the_reads_around_it(tmp_path):
    """Where no tensor leads from one to the next."""

    class Swap(tf.Module):
        def __init__(self):
            self.value = tf.Variable(tf.zeros([4]))

        @tf.function(input_signature=[tf.TensorSpec((4,))])
        def swap(self, x):
            old = self.value.read_value()
            self.value.assign(x)
            return {"old": tf.identity(old), "new": self.value.read_value() * 2.0}

    swap = Swap()
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [swap.swap.get_concrete_function()], swap
    )
    converter.experimental_enable_resource_variables = True
    path = tmp_path / "swap.tflite"
    path.write_bytes(converter.convert())
    graph = Graph(flatbuffer.read(path))
    uses = [i for i, name in enumerate(graph.names) if name in ("READ_VARIABLE", "ASSIGN_VARIABLE")]
    first, assignment, second = uses
    assert graph.names[assignment] == "ASSIGN_VARIABLE"
    assert first in graph.before[assignment]
    assert assignment in graph.before[second]


def test_reads_are_not_put_first_where_that_takes_more(tmp_path):
    """What is read stays: before a peak that is over when it is read, it would add to that."""

    class Late(tf.Module):
        def __init__(self):
            self.table = tf.Variable(np.ones(50_000, np.float32))

        @tf.function(input_signature=[tf.TensorSpec((1,))])
        def run(self, x):
            wide = tf.cumsum(tf.tile(x, [60_000]))
            with tf.control_dependencies([self.table.assign_add(tf.reshape(wide[:50_000], [-1]))]):
                return {"y": tf.reduce_sum(self.table.read_value())}

    module, path = Late(), tmp_path / "late.tflite"
    converter = tf.lite.TFLiteConverter.from_concrete_functions(
        [module.run.get_concrete_function()], module
    )
    converter.experimental_enable_resource_variables = True
    path.write_bytes(converter.convert())
    for scheduled in tflite_tools.schedule(path, tmp_path / "scheduled.tflite"):
        assert scheduled.after <= scheduled.before


@pytest.mark.parametrize("field", ["subgraph", "input"])
def test_a_signature_that_leads_nowhere(trainable, tmp_path, field):
    model = flatbuffer.read(trainable)
    signature = model.signatureDefs[0]
    if field == "subgraph":
        signature.subgraphIndex = 99
    else:
        signature.inputs[0].tensorIndex = 9999
    broken = tmp_path / "broken.tflite"
    flatbuffer.write(model, broken)
    with pytest.raises(tflite_tools.FileFormatError, match="9"):
        flatbuffer.read(broken)
