"""Wheels carry the native kernels compiled, where TensorFlow and a C++ compiler are at hand.

Without these (pip's isolated builds have no TensorFlow) a wheel is pure Python, and
the kernels are compiled on first use.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sysconfig
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeKernels(BuildHookInterface):
    """Compiles the kernels into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling."""
        if version == "editable" or importlib.util.find_spec("tensorflow") is None:
            return
        build = self._build_module()
        self._folder = tempfile.TemporaryDirectory()
        library = pathlib.Path(self._folder.name) / build.LIBRARY
        try:
            # The C++ library within: the system's own may be older where the wheel is used.
            build.build(library, "-static-libstdc++", "-static-libgcc")
        except build.BuildError as error:
            self.app.display_warning(f"a wheel without compiled kernels: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False
        build_data["force_include"][str(library)] = f"bittrain_tf/native/{build.LIBRARY}"

    def _build_module(self) -> Any:
        """`bittrain_tf.native.build`, without importing the package it is in."""
        path = pathlib.Path(self.root) / "bittrain_tf" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("bittrain_native_build", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
