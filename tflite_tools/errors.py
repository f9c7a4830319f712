"""What cannot be exported, said so that the layer can be found."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """A model has something that TensorFlow Lite cannot train.

    Attributes:
        what: The operation.
        layer: Where it comes from.
    """

    def __init__(self, what: str, layer: str) -> None:
        self.what, self.layer = what, layer
        super().__init__(
            f"{layer} needs {what}, for which TensorFlow Lite has no builtin operator and "
            "tflite_tools no rule. Replace the layer by one made of supported operations, or "
            "freeze it and what is below it (layer.trainable = False) if it is only its gradient "
            "that is missing."
        )


def layer_of(name: str) -> str:
    """Of an operation's name, the part that says which layer it belongs to."""
    parts = [
        part
        for part in name.split("/")
        if part and part not in ("gradient_tape", "PartitionedCall")
    ]
    return f"layer {'/'.join(parts[:-1])!r}" if len(parts) > 1 else f"operation {name!r}"
