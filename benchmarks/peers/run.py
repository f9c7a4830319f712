"""Child processes for `benchmarks.peers`, and the file that remembers what they found."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

# How memory is measured there holds here, whatever it comes to be.
from bittrain_tf.analysis.measure import _MEMORY_ENVIRONMENT

_MEMORY_TASKS = ("memory", "need", "trains")


class Results:
    """What was found so far, by request; kept in a file after every child process."""

    def __init__(self, path, about, resume):
        self._path, self._about = path, about
        self._found = {}
        if resume and path.exists():
            saved = json.loads(path.read_text())
            # Figures of other versions do not go into one table with these.
            if saved["about"] != about:
                raise SystemExit(
                    f"{path} was measured otherwise ({saved['about']}, and this is {about}); "
                    "leave out --resume to start anew."
                )
            self._found = saved["found"]

    def get(self, request, timeout):
        """What comes of a request: as it was found before, or from a child process."""
        key = json.dumps(request, sort_keys=True)
        if key not in self._found:
            self._found[key] = run_child(request, timeout)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(".tmp")
            written.write_text(
                json.dumps({"about": self._about, "found": self._found}, indent=1) + "\n"
            )
            written.replace(self._path)  # whole, or the one before, if this is interrupted
        return self._found[key]


def run_child(request, timeout):
    """What comes of a request in a process of its own; `{"error": ...}` if it does not end well."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    for name, value in _MEMORY_ENVIRONMENT.items():
        environment.pop(name, None)
        if request["task"] in _MEMORY_TASKS:
            environment[name] = value
    with tempfile.TemporaryDirectory(prefix="bittrain-") as folder:
        request_file = pathlib.Path(folder, "request.json")
        result_file = pathlib.Path(folder, "result.json")
        request_file.write_text(json.dumps({**request, "result": str(result_file)}))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.peers.child", str(request_file)],
                cwd=pathlib.Path(__file__).parents[2],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {timeout:g} s"}
        if done.returncode or not result_file.exists():
            return {"error": death(done)}
        return json.loads(result_file.read_text())


def death(done):
    """How a process ended, and the last that it said."""
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    # Without the log lines of TensorFlow's start, which say nothing of it.
    told = [line for line in done.stderr.splitlines() if not re.match(r"[IW]\d{4} |WARNING", line)]
    return f"{how}: {told[-1].strip()}" if told else how
