"""What a file says of itself: JSON in its metadata."""

from __future__ import annotations

import json
import os
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


def of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a file that `tflite_tools.export` wrote.

    Raises:
        FileFormatError: If it is not a whole `.tflite` file.
        ValueError: If it has none, or one of a later version.
    """
    content = fb.metadata(path, _NAME)
    if content is None:
        raise ValueError(f"{path} has no training manifest: tflite_tools.export did not write it.")
    manifest = json.loads(content)
    if manifest["version"] > VERSION:
        raise ValueError(
            f"The manifest of {path} has version {manifest['version']}, and this is tflite_tools "
            f"for versions up to {VERSION}. Upgrade bittrain-tf."
        )
    return manifest
