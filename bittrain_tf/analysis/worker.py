"""A child process that is asked for one thing after another, so that several can take turns."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bittrain_tf.analysis.children import environment, failure, slowness


@contextlib.contextmanager
def worker(
    arguments: Sequence[str], *, what: str, timeout: float
) -> Iterator[Callable[[Any], Any]]:
    """Python in a process of its own, in the environment of this one, within the `with` block.

    Args:
        arguments: What to run, as arguments of Python: `["-m", module]`. It calls `serve`.
        what: What it does, for messages: "measuring VGG16".
        timeout: Seconds it may take to answer.

    Yields:
        `ask(question)`, the answer to a question: both are anything that can be pickled. It
        raises a `RuntimeError` if the process has ended, with the end of what it wrote, and a
        `TimeoutError` if it takes too long.
    """
    here, there = socket.socketpair()
    # Into a file, since a pipe that nobody empties would stop the process once it is full.
    with tempfile.TemporaryFile("w+", errors="replace") as stderr, Connection(here.detach()) as end:
        with there:
            process = subprocess.Popen(
                [sys.executable, *arguments, str(there.fileno())],
                env=environment(),
                pass_fds=[there.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

        def ask(question: Any) -> Any:
            try:
                end.send(question)
                if not end.poll(timeout):
                    raise slowness(what, timeout)
                return end.recv()
            except (EOFError, ConnectionError):
                code = process.wait()
                stderr.seek(0)
                raise failure(what, code, stderr.read()) from None

        try:
            yield ask
        finally:
            process.kill()
            process.wait()


def serve(answers: Callable[[Any], Iterator[Any]]) -> None:
    """What a worker's main function does: answer until nobody asks any more.

    Args:
        answers: A generator function. It is called with the first question; each value it
            yields is an answer, and each further question resumes it.
    """
    with Connection(int(sys.argv[-1])) as end, contextlib.suppress(EOFError):
        for answer in answers(end.recv()):
            end.send(answer)
            end.recv()
