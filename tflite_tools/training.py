"""The functions that a file offers: what Keras traces of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from bittrain_tf.pruning.report import prunings

# As keras.random.SeedGenerator names its state.
_RANDOM_STATE = "seed_generator_state"

#: The converter takes no function without an argument; the device must give one.
NOTHING = tf.TensorSpec([1], tf.float32, "nothing")

Function = Callable[..., dict[str, tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function and what it takes.

    Attributes:
        fn: The function.
        specs: Its arguments; their names are those of the signature.
        batched: How many of them, the first, have a sample a row and may be taken apart.
    """

    fn: Function
    specs: list[tf.TensorSpec]
    batched: int = 0


class Training:
    """A model with its loss and its optimizer, at a fixed batch size.

    Args:
        model: A built Keras model with one output.
        loss: A Keras loss, or `loss(y, prediction)`, the loss of each sample or of the batch.
        optimizer: A Keras optimizer; it is built if it is not.
        metrics: Functions `metric(y, prediction)`, the metric of each sample.
        batch_size: The size of every batch.
        sample_weight: Whether samples have weights.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: keras.losses.Loss | Callable[..., tf.Tensor],
        optimizer: keras.optimizers.Optimizer,
        metrics: dict[str, Callable[..., tf.Tensor]],
        batch_size: int,
        sample_weight: bool,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.metrics, self.batch_size = metrics, batch_size
        if not isinstance(optimizer.learning_rate, keras.Variable):
            raise ValueError(
                "The optimizer's learning rate is a schedule. On the device it is an input of "
                "each step: export with a number, and pass train_step(learning_rate=...) what the "
                "schedule says."
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.inputs = [self._spec(x, name) for name, x in _names(model.inputs)]
        (output,) = model.outputs
        self.target = self._target(output)
        weight = tf.TensorSpec([batch_size], tf.float32, "sample_weight")
        self.weights = [weight] if sample_weight else []

    def variables(self) -> dict[str, keras.Variable]:
        """Everything that training changes, or reads, by name; the optimizer's own at the end."""
        learning_rate = self.optimizer.learning_rate
        # Thresholds of pruned outputs are constants in the file.
        pruning = {id(v) for part in prunings(self.model).values() for v in part.variables}
        of_model = [
            v for v in self.model.variables if v.name != _RANDOM_STATE and id(v) not in pruning
        ]
        slots = [v for v in self.optimizer.variables if v is not learning_rate]
        # Without the optimizer's own name, which Keras counts up.
        own = f"{self.optimizer.name}/"
        paths = [(v.path, v) for v in of_model]
        paths += [(f"optimizer/{v.path.removeprefix(own)}", v) for v in slots]
        named: dict[str, keras.Variable] = {}
        for path, variable in paths:
            name, number = path, 1
            while name in named:
                number += 1
                name = f"{path}_{number}"
            named[name] = variable
        return named

    def random_states(self) -> list[keras.Variable]:
        """The states of Keras's random generators, of which the device has its own."""
        return [v for v in self.model.variables if v.name == _RANDOM_STATE]

    def signatures(self) -> dict[str, Signature]:
        """Those that compute something; see `transfer` for those that move weights."""
        rate = tf.TensorSpec([], tf.float32, "learning_rate")
        data = [*self.inputs, self.target, *self.weights]
        return {
            "train": Signature(self._train, [*data, rate], len(data)),
            "infer": Signature(self._infer, list(self.inputs)),
            "evaluate": Signature(self._evaluate, data),
        }

    def _train(self, *arguments: tf.Tensor) -> dict[str, tf.Tensor]:
        *data, rate = arguments
        trained = self.model.trainable_variables
        with tf.GradientTape() as tape:
            results, loss = self._results(data, training=True)
        gradients = tape.gradient(loss, [v.value for v in trained])
        self.optimizer.learning_rate = rate
        self.optimizer.apply(gradients, trained)
        return results

    def _evaluate(self, *data: tf.Tensor) -> dict[str, tf.Tensor]:
        return self._results(data, training=False)[0]

    def _infer(self, *inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"output": self._predict(inputs, training=False)}

    def _results(
        self, data: Sequence[tf.Tensor], training: bool
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        inputs, (y, *weights) = data[: len(self.inputs)], data[len(self.inputs) :]
        prediction = self._predict(inputs, training)
        loss = self._loss(y, prediction, *weights)
        results = {"loss": loss}
        for name, metric in self.metrics.items():
            results[name] = tf.reduce_mean(tf.cast(metric(y, prediction), tf.float32))
        return results, loss

    def _loss(self, y: tf.Tensor, prediction: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        if isinstance(self.loss, keras.losses.Loss):
            loss = self.loss(y, prediction, sample_weight=weights[0] if weights else None)
        else:
            each = tf.convert_to_tensor(self.loss(y, prediction))
            for weight in weights:
                each = each * tf.reshape(weight, [-1, *[1] * (len(each.shape) - 1)])
            loss = tf.reduce_mean(each)
        return tf.add_n([loss, *map(tf.convert_to_tensor, self.model.losses)])

    def _predict(self, inputs: Sequence[tf.Tensor], training: bool) -> tf.Tensor:
        given = list(inputs) if len(inputs) > 1 else inputs[0]
        return keras.tree.flatten(self.model(given, training=training))[0]

    def _spec(self, x: keras.KerasTensor, name: str) -> tf.TensorSpec:
        if None in x.shape[1:]:
            raise ValueError(
                f"Input {x.name!r} has shape {x.shape}: on the device every size but the batch's "
                "must be known. Build the model with a full input shape."
            )
        return tf.TensorSpec([self.batch_size, *x.shape[1:]], x.dtype, name)

    def _target(self, output: keras.KerasTensor) -> tf.TensorSpec:
        sparse = isinstance(self.loss, keras.losses.SparseCategoricalCrossentropy)
        shape = output.shape[1:-1] if sparse else output.shape[1:]
        if None in shape:
            raise ValueError(
                f"The model's output has shape {output.shape}: on the device every size but the "
                "batch's must be known."
            )
        return tf.TensorSpec([self.batch_size, *shape], tf.int32 if sparse else tf.float32, "y")


def transfer_shape(shape: Sequence[int]) -> list[int]:
    """As what a variable of a shape goes in and out.

    Single numbers as vectors of one: LiteRT's `CompiledModel` (2.3) cannot give out what a read of
    a variable of no dimensions makes.
    """
    return list(shape) or [1]


def transfer(variables: dict[str, tf.Variable]) -> dict[str, Signature]:
    """The signatures that take all variables out, put them in, and set them back.

    Each argument and result is one variable, in the order given, named `v0`, `v1`, ...
    """
    initial = [v.numpy() for v in variables.values()]
    values = list(variables.values())

    def get(nothing: tf.Tensor) -> dict[str, tf.Tensor]:
        read = [tf.reshape(v.read_value(), transfer_shape(v.shape)) for v in values]
        return {f"v{i}": tf.identity(x) for i, x in enumerate(read)}

    def put(*given: tf.Tensor) -> dict[str, tf.Tensor]:
        for variable, value in zip(values, given, strict=True):
            variable.assign(tf.reshape(value, variable.shape))
        return {"count": tf.constant([len(values)], tf.int32)}

    def reset(nothing: tf.Tensor) -> dict[str, tf.Tensor]:
        return put(*map(tf.constant, initial))

    specs = [tf.TensorSpec(transfer_shape(v.shape), v.dtype, f"v{i}") for i, v in enumerate(values)]
    return {
        "get_weights": Signature(get, [NOTHING]),
        "set_weights": Signature(put, specs),
        "reset": Signature(reset, [NOTHING]),
    }


def _names(inputs: Sequence[keras.KerasTensor]) -> list[tuple[str, keras.KerasTensor]]:
    if len(inputs) == 1:
        return [("x", inputs[0])]
    return [(x.name, x) for x in inputs]
