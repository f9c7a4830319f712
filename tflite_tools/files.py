"""Writing files: whole or not at all, and over nothing that is to stay."""

from __future__ import annotations

import os
import pathlib
import tempfile


def refuse_to_overwrite(path: pathlib.Path, overwrite: bool) -> None:
    """Raise FileExistsError if `path` is there and is to stay."""
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists. Pass overwrite=True (--overwrite) to replace it, or another path."
        )


def write_whole(path: pathlib.Path, content: bytes) -> None:
    """Write `content`, or leave what is at `path` as it is if that breaks off."""
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
