"""A command in a terminal of its own, as its users see it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.timing import PATIENCE

# Makes standard input the controlling terminal, so that Ctrl-C is a signal. In the child: jax forbids to fork here.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """What a process shows, and the keys that it gets. Writer of `shown`: `until`."""

    def __init__(self, process: subprocess.Popen[bytes], file: int) -> None:
        self.process = process
        self.shown = ""
        self._seen = 0
        self._file = file

    def until(self, text: str) -> None:
        """Read until a text is shown after those that were waited for before; fails if it never is."""
        assert self._shows(text, PATIENCE), self.shown

    def interrupt(self, text: str) -> None:
        """Type Ctrl-C until a text is shown: CPython's `input` misses a signal just after its prompt."""
        end = time.monotonic() + PATIENCE
        self.type("\x03")
        while not self._shows(text, 1.0):
            assert time.monotonic() < end, self.shown
            self.type("\x03")

    def _shows(self, text: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (at := self.shown.find(text, self._seen)) < 0:
            ready, _, _ = select.select([self._file], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            try:
                self.shown += os.read(self._file, 65536).decode(errors="replace")
            except OSError as error:  # the process has left
                raise AssertionError(f"ended before {text!r}: {self.shown}") from error
        self._seen = at + len(text)
        return True

    def type(self, keys: str) -> None:
        os.write(self._file, keys.encode())

    def status(self) -> int:
        """Wait until the process has ended."""
        return self.process.wait(PATIENCE)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    """Run `python -m jaxserve` with these words in a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-c", OWN_TERMINAL, "-m", "jaxserve", *words]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
