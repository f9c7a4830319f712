"""The rules, by the type of the operation they stand in for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

#: `rule(op, *inputs)`: the outputs of `op`, an operation of the traced graph whose shapes and
#: attributes count, computed anew from `inputs`; None to leave it as it is.
Rule = Callable[..., "tf.Tensor | Sequence[tf.Tensor | None] | None"]

_RULES: dict[str, Rule] = {}


def register(*types: str) -> Callable[[Rule], Rule]:
    """Let a function stand in for operations of these types."""

    def add(rule: Rule) -> Rule:
        for name in types:
            if name in _RULES:
                raise ValueError(f"There is a rule for {name} already: {_RULES[name]}.")
            _RULES[name] = rule
        return rule

    return add


def find(name: str) -> Rule | None:
    """The rule for an operation type; None if the converter knows what to do with it."""
    return _RULES.get(name)


def attribute(op: tf.Operation, name: str) -> Any:
    """An attribute of an operation; strings as such."""
    value = op.get_attr(name)
    return value.decode() if isinstance(value, bytes) else value


def static_shape(x: tf.Tensor) -> list[int]:
    """The shape of a tensor; every size is known, since the batch size is."""
    if not x.shape.is_fully_defined():
        raise NotImplementedError(
            f"{x.op.name} has shape {x.shape}: on the device every size must be known. Export a "
            "model whose input shapes are known."
        )
    return x.shape.as_list()
