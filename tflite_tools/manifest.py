"""What a file says of itself: JSON in its metadata."""

from __future__ import annotations

import json
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tflite_tools import flatbuffer as fb

_NAME = "bittrain_training"
#: Of the manifest's format.
VERSION = 1


def attach(model: schema.ModelT, manifest: dict[str, Any]) -> None:
    """Put a manifest into a model's metadata, in place of one that is there."""
    content = json.dumps({"version": VERSION, **manifest}, sort_keys=True).encode()
    fb.set_metadata(model, _NAME, content)


def of(model: schema.ModelT) -> dict[str, Any]:
    """The manifest of a model that `tflite_tools.export` wrote.

    Raises:
        ValueError: If it has none, or one of a later version.
    """
    for metadata in fb.listed(model.metadata):
        if fb.text(metadata.name) == _NAME:
            content = json.loads(bytes(fb.listed(model.buffers[metadata.buffer].data)))
            if content["version"] > VERSION:
                raise ValueError(
                    f"The file's manifest has version {content['version']}, and this is "
                    f"tflite_tools for versions up to {VERSION}. Upgrade bittrain-tf."
                )
            return content
    raise ValueError("The file has no training manifest: tflite_tools.export did not write it.")
