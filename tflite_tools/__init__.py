"""Training on the device: `.tflite` files that train, in little memory."""

from __future__ import annotations

import importlib
from typing import Any

# By name, where it is. Imported when it is asked for: a board that only trains a file has room for
# LiteRT, but not for TensorFlow beside it.
_HOMES = {
    "Exported": "exporting",
    "FileFormatError": "flatbuffer",
    "Inspected": "inspection",
    "Measured": "measurement",
    "Scheduled": "scheduling",
    "Trainer": "trainer",
    "UnsupportedError": "errors",
    "Verified": "verification",
    "export": "exporting",
    "inspect": "inspection",
    "measure": "measurement",
    "schedule": "scheduling",
    "verify": "verification",
}

__all__ = [
    "Exported",
    "FileFormatError",
    "Inspected",
    "Measured",
    "Scheduled",
    "Trainer",
    "UnsupportedError",
    "Verified",
    "export",
    "inspect",
    "measure",
    "schedule",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
