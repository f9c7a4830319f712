"""Python in a process of its own."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def python(*arguments, timeout=600, **environment):
    """What came of `python ARGUMENTS` in the repository's root, whether it failed or not."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
