"""The table of layers and options that the parity tests go through.

A case is a layer and what it reads. Every registered layer has one at least, and
every constructor option that reaches the computation has one. The first case of a
layer is its plain one, which is also tried under the other dtype policies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer to compare.

    Attributes:
        cls: The Keras class.
        options: Its constructor arguments.
        shape: Shape of the input, with the batch.
        inputs: How many inputs of that shape it merges; 0 for a layer of one input.
        signed: Whether the layer should see negative inputs too.
        call: Arguments by name of the layer's call.
        attends: Whether its inputs are arguments: query, value and key. A single one is
            query and value.
        prepare: What to do with the layer once it is built.
        trainable: The layer's `trainable`.
    """

    cls: type[keras.layers.Layer]
    options: dict[str, Any]
    shape: tuple[int, ...]
    inputs: int = 0
    signed: bool = False
    call: dict[str, Any] = dataclasses.field(default_factory=dict)
    attends: bool = False
    prepare: Callable[[keras.layers.Layer], None] | None = None
    trainable: bool = True

    def make(self, policy: str) -> keras.layers.Layer:
        """A new layer, not built."""
        layer = self.cls(**self.options, dtype=policy, name=self.cls.__name__.lower())
        layer.trainable = self.trainable
        return layer

    def __str__(self) -> str:
        """An identifier for pytest: the class and its options."""
        options = [f"{k}={_short(v)}" for k, v in (self.options | self.call).items()]
        options += [f"inputs={self.inputs}"] * (self.attends and self.inputs > 0)
        extra = ["frozen"] * (not self.trainable)
        extra += [self.prepare.__name__] if self.prepare else []
        return "-".join([self.cls.__name__, *options, *extra])


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return "array"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return str(value).replace(" ", "")


def enable_lora(layer: keras.layers.Layer) -> None:
    layer.enable_lora(rank=1)


def freeze_kernel(layer: keras.layers.Layer) -> None:
    """Train the bias only."""
    layer._kernel.trainable = False


LINE, IMAGE, VOLUME = (2, 9, 4), (2, 7, 6, 4), (2, 4, 5, 4, 2)
TRIANGLE = np.tri(9, dtype=bool)[None]
SHAPE_OF_RANK = {1: LINE, 2: IMAGE, 3: VOLUME}
CHANNELS_FIRST = {"data_format": "channels_first"}
WEIGHT_OPTIONS = [
    {"use_bias": False},
    {"bias_regularizer": "l2", "activity_regularizer": "l1"},
]
KERNEL_OPTIONS = [{"kernel_regularizer": "l1", "kernel_constraint": "non_neg"}]
ACTIVATIONS = ["relu", "relu6", "leaky_relu", "gelu", "tanh"]
ONE_FUNCTION_EACH = [
    *("relu", "relu6", "leaky_relu", "hard_sigmoid", "hard_shrink", "soft_shrink", "hard_tanh"),
    *("celu", "gelu", "glu", "hard_silu", "log_sigmoid", "mish", "sparse_plus", "squareplus"),
    *("tanh_shrink", keras.ops.relu, keras.ops.leaky_relu),
]


def _cases(cls, required: dict, shape, *options: dict, **fields: Any) -> list[Case]:
    return [Case(cls, {**required, **extra}, shape, **fields) for extra in ({}, *options)]


def _convolutions() -> list[Case]:
    cases = []
    for rank, cls in enumerate((layers.Conv1D, layers.Conv2D, layers.Conv3D), start=1):
        required, shape = {"filters": 4, "kernel_size": 3 if rank < 3 else 2}, SHAPE_OF_RANK[rank]
        options = [
            {"strides": 2, "padding": "same"},
            {"dilation_rate": 2},
            {"groups": 2},
            *({"activation": a} for a in ACTIVATIONS[: 5 if rank == 2 else 1]),
            *WEIGHT_OPTIONS,
            *KERNEL_OPTIONS,
        ]
        if rank == 1:
            options += [{"padding": "causal"}, {"padding": "causal", "dilation_rate": 2}]
        if rank == 3:
            options += [CHANNELS_FIRST]  # which the CPU has for this rank only
        cases += _cases(cls, required, shape, *options)
        cases += [Case(cls, required, shape, prepare=enable_lora)]
        cases += [Case(cls, {**required, "activation": "relu"}, shape, trainable=False)]
    cases += [Case(layers.Conv2D, {"filters": 4, "kernel_size": 1}, IMAGE)]
    cases += [Case(layers.Conv2D, required, IMAGE, prepare=freeze_kernel)]
    return cases


def _depthwise_and_separable() -> list[Case]:
    cases = []
    for rank, depthwise, separable in (
        (1, layers.DepthwiseConv1D, layers.SeparableConv1D),
        (2, layers.DepthwiseConv2D, layers.SeparableConv2D),
    ):
        options = [
            {"strides": 2, "padding": "same"},
            {"dilation_rate": 2},
            {"depth_multiplier": 2},
            {"activation": "relu"},
            {"depthwise_regularizer": "l1", "depthwise_constraint": "non_neg"},
            *WEIGHT_OPTIONS,
        ]
        shape = SHAPE_OF_RANK[rank]
        cases += _cases(depthwise, {"kernel_size": 3}, shape, *options)
        cases += _cases(separable, {"filters": 3, "kernel_size": 3}, shape, *options)
        cases += [Case(depthwise, {"kernel_size": 3}, shape, trainable=False)]
        cases += [Case(separable, {"filters": 3, "kernel_size": 3}, shape, trainable=False)]
    return cases


def _transposed_convolutions() -> list[Case]:
    cases = []
    for rank, cls in enumerate(
        (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose), start=1
    ):
        options = [
            {"strides": 2, "padding": "same"},
            {"strides": 2, "padding": "same", "output_padding": 1},
            {"activation": "relu"},
            *([{"dilation_rate": 2}] if rank < 3 else []),
            *WEIGHT_OPTIONS,
            *KERNEL_OPTIONS,
        ]
        cases += _cases(cls, {"filters": 3, "kernel_size": 2}, SHAPE_OF_RANK[rank], *options)
    return cases


def _products() -> list[Case]:
    dense = _cases(
        layers.Dense,
        {"units": 3},
        (3, 10),
        *({"activation": a} for a in ACTIVATIONS),
        *WEIGHT_OPTIONS,
        *KERNEL_OPTIONS,
    )
    einsum = _cases(
        layers.EinsumDense,
        {"equation": "abc,cd->abd", "output_shape": (None, 5)},
        LINE,
        {"bias_axes": "d", "activation": "relu", "kernel_regularizer": "l2"},
    )
    return [
        *dense,
        Case(layers.Dense, {"units": 3}, LINE),
        Case(layers.Dense, {"units": 3}, (3, 10), prepare=enable_lora),
        Case(layers.Dense, {"units": 3}, (3, 10), trainable=False),
        *einsum,
        Case(layers.EinsumDense, einsum[1].options, LINE, prepare=enable_lora),
    ]


def _activations() -> list[Case]:
    rectifiers = _cases(
        layers.ReLU,
        {},
        IMAGE,
        {"max_value": 6},
        {"max_value": 0.5},
        {"threshold": 0.3},
        {"max_value": 1.0, "threshold": 0.3},
        {"negative_slope": 0.1},
        {"negative_slope": 0.1, "max_value": 0.5},
        {"negative_slope": 0.1, "max_value": 0.5, "threshold": 0.2},
        signed=True,
    )
    functions = [
        Case(layers.Activation, {"activation": a}, IMAGE, signed=True) for a in ONE_FUNCTION_EACH
    ]
    return [
        *rectifiers,
        *functions,
        *_cases(layers.LeakyReLU, {}, IMAGE, {"negative_slope": 0.3}, signed=True),
        *_cases(
            layers.PReLU,
            {},
            IMAGE,
            {"shared_axes": [1, 2]},
            {"alpha_regularizer": "l2", "alpha_constraint": "non_neg"},
            signed=True,
        ),
        Case(layers.PReLU, {}, IMAGE, signed=True, trainable=False),
    ]


def _normalizations() -> list[Case]:
    return [
        *_cases(
            layers.BatchNormalization,
            {},
            IMAGE,
            {"axis": 1},
            {"center": False},
            {"scale": False},
            {"center": False, "scale": False},
            {"epsilon": 0.1, "momentum": 0.6},
            {"gamma_regularizer": "l2", "beta_constraint": "non_neg"},
        ),
        *(Case(layers.BatchNormalization, {}, shape) for shape in ((6, 5), LINE, VOLUME)),
        Case(layers.BatchNormalization, {}, IMAGE, trainable=False),
        *_sample_normalizations(),
    ]


def _sample_normalizations() -> list[Case]:
    weights = [
        {"center": False},
        {"scale": False},
        {"center": False, "scale": False},
        {"epsilon": 0.1},
        {"gamma_regularizer": "l2", "beta_constraint": "non_neg"},
    ]
    axes = [{"axis": 1}, {"axis": [1, 2]}]
    groups = [{"groups": 1}, {"groups": -1}, {"groups": 3, "axis": 2}]
    return [
        *_cases(layers.LayerNormalization, {}, IMAGE, *axes, {"rms_scaling": True}, *weights),
        *_cases(layers.GroupNormalization, {"groups": 2}, IMAGE, *groups, *weights),
        # Keras multiplies by the scale as it is, so that its axes must be the last.
        *_cases(layers.RMSNormalization, {}, IMAGE, {"axis": [2, 3]}, {"epsilon": 0.1}),
        *_cases(layers.UnitNormalization, {}, IMAGE, *axes),
        Case(layers.LayerNormalization, {}, IMAGE, trainable=False),
        Case(layers.GroupNormalization, {"groups": 2}, IMAGE, trainable=False),
        Case(layers.RMSNormalization, {}, IMAGE, trainable=False),
    ]


def _attentions() -> list[Case]:
    options = [
        {"dropout": 0.3},
        {"dropout": 0.3, "seed": 5},
        {"use_bias": False},
        {"use_gate": True},
        {"sliding_window": 2},
        {"flash_attention": False},
        {"kernel_regularizer": "l1", "kernel_constraint": "non_neg"},
        {"bias_regularizer": "l2", "activity_regularizer": "l1"},
    ]
    multi = {"num_heads": 2, "key_dim": 3}
    grouped = {"head_dim": 3, "num_query_heads": 4, "num_key_value_heads": 2}
    calls = [{"use_causal_mask": True}, {"attention_mask": TRIANGLE}]
    cases = []
    for cls, required in (
        (layers.MultiHeadAttention, multi),
        (layers.GroupQueryAttention, grouped),
    ):
        cases += [Case(cls, required, LINE, attends=True)]
        cases += _cases(cls, required, LINE, *options, inputs=2, attends=True)
        for extra in ({}, {"dropout": 0.3}):
            named = {"inputs": 2, "attends": True}
            cases += [Case(cls, {**required, **extra}, LINE, call=call, **named) for call in calls]
        cases += [
            Case(cls, required, LINE, inputs=3, attends=True),
            Case(cls, required, LINE, 2, call={"return_attention_scores": True}, attends=True),
            Case(cls, required, LINE, 2, attends=True, trainable=False),
        ]
    for shape, extra in (
        (LINE, {"value_dim": 2}),
        (LINE, {"output_shape": 5}),
        (IMAGE, {}),
        (IMAGE, {"attention_axes": 1}),
        (IMAGE, {"attention_axes": (1, 2), "dropout": 0.3}),
    ):
        cases += [Case(layers.MultiHeadAttention, {**multi, **extra}, shape, 2, attends=True)]
    return cases


def _poolings() -> list[Case]:
    cases = []
    for rank in (1, 2, 3):
        shape = SHAPE_OF_RANK[rank]
        cases += _cases(
            getattr(layers, f"MaxPooling{rank}D"),
            {},
            shape,
            {"padding": "same"},
            {"pool_size": 3, "padding": "same"},
            {"pool_size": 3, "strides": 2},
            {"pool_size": 3, "strides": 1, "padding": "same"},
            {"pool_size": 2, "strides": 3},
            CHANNELS_FIRST,
            signed=True,
        )
        pool = getattr(layers, f"GlobalMaxPooling{rank}D")
        cases += _cases(pool, {}, shape, {"keepdims": True}, CHANNELS_FIRST, signed=True)
    return cases


def _dropouts() -> list[Case]:
    return [
        *_cases(
            layers.Dropout,
            {"rate": 0.3},
            IMAGE,
            {"seed": 5},
            {"rate": 0.0},
            {"noise_shape": (None, 1, 6, 4)},
        ),
        Case(layers.SpatialDropout1D, {"rate": 0.4}, LINE),
        Case(layers.SpatialDropout2D, {"rate": 0.4}, IMAGE),
        Case(layers.SpatialDropout2D, {"rate": 0.4, **CHANNELS_FIRST}, IMAGE),
        Case(layers.SpatialDropout3D, {"rate": 0.4}, VOLUME),
    ]


def _mergings() -> list[Case]:
    return [
        Case(layers.Add, {}, IMAGE, inputs=2),
        Case(layers.Add, {}, IMAGE, inputs=3),
        Case(layers.Multiply, {}, IMAGE, inputs=2),
        Case(layers.Multiply, {}, IMAGE, inputs=3),
        Case(layers.Maximum, {}, IMAGE, inputs=2),
        Case(layers.Minimum, {}, IMAGE, inputs=2),
        Case(layers.Concatenate, {}, IMAGE, inputs=2),
        Case(layers.Concatenate, {"axis": 1}, IMAGE, inputs=3),
    ]


def _views() -> list[Case]:
    cases = [
        *_cases(layers.Flatten, {}, IMAGE, CHANNELS_FIRST),
        *_cases(layers.Permute, {"dims": (3, 1, 2)}, IMAGE),
        *_cases(layers.RepeatVector, {"n": 3}, (2, 5)),
        *_cases(layers.Reshape, {"target_shape": (4, -1)}, IMAGE),
        *_cases(layers.UpSampling1D, {}, LINE, {"size": 3}),
        *_cases(
            layers.UpSampling2D,
            {},
            IMAGE,
            {"size": (2, 3)},
            {"interpolation": "bilinear"},
            CHANNELS_FIRST,
        ),
        *_cases(layers.UpSampling3D, {}, VOLUME, {"size": (1, 2, 1)}, CHANNELS_FIRST),
    ]
    for rank in (1, 2, 3):
        padding = {1: (2, 1), 2: ((1, 0), (2, 1)), 3: ((1, 0), (0, 1), (1, 1))}[rank]
        for kind, option in (("ZeroPadding", "padding"), ("Cropping", "cropping")):
            cls = getattr(layers, f"{kind}{rank}D")
            cropped = kind == "Cropping" and rank == 3
            shape = (2, 4, 5, 4, 3) if cropped else SHAPE_OF_RANK[rank]
            first = [] if (kind, rank) == ("Cropping", 1) else [CHANNELS_FIRST]
            cases += _cases(cls, {}, shape, {option: padding}, *first)
    return cases


CASES = [
    *_convolutions(),
    *_depthwise_and_separable(),
    *_transposed_convolutions(),
    *_products(),
    *_activations(),
    *_normalizations(),
    *_attentions(),
    *_poolings(),
    *_dropouts(),
    *_mergings(),
    *_views(),
]

PLAIN_CASES = list({case.cls: case for case in reversed(CASES)}.values())[::-1]
