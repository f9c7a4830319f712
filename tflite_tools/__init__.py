"""Training on the device: `.tflite` files that train, in little memory."""

from tflite_tools.errors import UnsupportedError
from tflite_tools.export import Exported, export
from tflite_tools.flatbuffer import FileFormatError
from tflite_tools.inspection import Inspected, inspect
from tflite_tools.schedule import Scheduled, schedule
from tflite_tools.trainer import Trainer

__all__ = [
    "Exported",
    "FileFormatError",
    "Inspected",
    "Scheduled",
    "Trainer",
    "UnsupportedError",
    "export",
    "inspect",
    "schedule",
]
