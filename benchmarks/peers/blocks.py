"""Recomputation by hand: the blocks of a functional model, each called through tf.recompute_grad.

Written as its documentation suggests, without remedies: what a second forward pass does besides
(BatchNormalization's statistics, random numbers) is for the benchmark to find.
"""

import itertools
import re

import keras
import tensorflow as tf

# Where a block ends, by layer name; the first of each is where the layers before the blocks end.
_ENDS = {
    "vgg16": r"block\d_pool",
    "resnet50": r"pool1_pool|conv\d_block\d+_out",
    "densenet121": r"pool1|conv\d_block\d+_concat|pool\d_pool",
    "mobilenetv2": r"Conv1_relu|(?P<block>.*)_(add|project_BN)",
    "efficientnetb0": r"stem_activation|(?P<block>.*)_(add|project_bn)",
    "encoder": r"embedded|block\d_add2",
}


def recomputed(model):
    """`model` with its blocks recomputed: the same layers, to be compiled anew."""
    tensors = [model.inputs[0], *ends(model), model.outputs[0]]
    blocks = [keras.Model(start, end) for start, end in itertools.pairwise(tensors)]
    return Recomputed(model, blocks)


def ends(model):
    """The tensors at which the blocks end, in order; no other tensor leads past them."""
    pattern = next((p for name, p in _ENDS.items() if model.name.startswith(name)), None)
    if pattern is None:
        raise ValueError(f"Where the blocks of {model.name!r} end is not known; see {__file__}.")
    found = {}
    for layer in model.layers:
        match = re.fullmatch(pattern, layer.name)
        if match:
            # Of a block with both, the sum comes after the normalization, and counts.
            found[match.groupdict().get("block") or layer.name] = layer.output
    return list(found.values())


class Recomputed(keras.Model):
    """Runs blocks one after the other and keeps, of all but the last, the inputs alone.

    The last, the classifier, is where the backward pass begins: to recompute it saves nothing.
    """

    def __init__(self, model, blocks):
        super().__init__(name=model.name)
        self._model = model  # has the layers, in the order of the weights
        # Functions, for Keras not to find the same layers a second time.
        *recomputed, self._last = [block.__call__ for block in blocks]
        self._recomputed = recomputed
        self._whole_numbers = not model.inputs[0].dtype.startswith("float")

    def call(self, x, training=False):
        """The output of the last block."""
        for i, block in enumerate(self._recomputed):
            # Whole numbers have no gradient, which tf.recompute_grad wants to take.
            if i == 0 and self._whole_numbers:
                x = block(x, training=training)
            else:
                x = tf.recompute_grad(lambda x, block=block: block(x, training=training))(x)
        return self._last(x, training=training)
