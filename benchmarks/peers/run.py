"""Child processes of benchmarks, and the file that remembers what they found."""

import json
import re
import signal
import subprocess

from bittrain_tf.analysis import children

_MEMORY_TASKS = ("memory", "need", "trains")


class Results:
    """What was found so far, by request; kept in a file after every child process."""

    def __init__(self, path, about, resume, module="benchmarks.peers.child"):
        self._path, self._about, self._module = path, about, module
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
            self._found[key] = run_child(request, timeout, self._module)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(".tmp")
            written.write_text(
                json.dumps({"about": self._about, "found": self._found}, indent=1) + "\n"
            )
            written.replace(self._path)  # whole, or the one before, if this is interrupted
        return self._found[key]


def run_child(request, timeout, module="benchmarks.peers.child"):
    """What comes of a request in a process of its own; `{"error": ...}` if it does not end well."""
    try:
        done, result = children.complete(
            module,
            request,
            for_memory=request["task"] in _MEMORY_TASKS,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout:g} s"}
    return {"error": death(done)} if result is None else result


def death(done):
    """How a process ended, and the last that it said."""
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    # Without the log lines of TensorFlow's start, which say nothing of it.
    told = [line for line in done.stderr.splitlines() if not re.match(r"[IW]\d{4} |WARNING", line)]
    return f"{how}: {told[-1].strip()}" if told else how
