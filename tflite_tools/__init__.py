"""Training on the device: `.tflite` files that train, in little memory."""

from tflite_tools.errors import UnsupportedError
from tflite_tools.export import Exported, export
from tflite_tools.flatbuffer import FileFormatError
from tflite_tools.schedule import Scheduled, schedule

__all__ = ["Exported", "FileFormatError", "Scheduled", "UnsupportedError", "export", "schedule"]
