"""Processes that can be ended for certain: with everything that they started, in whatever session or group."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

WAIT = 5.0  # seconds for a killed process to end
ADOPT = 36  # PR_SET_CHILD_SUBREAPER


class Processes:
    """The children of this process, each in a session of its own, and the orphans that they leave."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        # Orphans become children of this process, so that `reap` finds them; without it, only their group is ended.
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)

    def run(
        self, command: Sequence[str], seconds: float, *, cwd: Path, env: Mapping[str, str], log: Path
    ) -> int | None:
        """Run a command, and end what it leaves behind. Returns its status, or None if it was stopped."""
        with log.open("ab") as written:
            with self._lock:
                child = subprocess.Popen(
                    command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
                self._running[child.pid] = child
            try:
                return child.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                self._end(child)

    def end_all(self) -> None:
        """Stop everything that runs."""
        for child in list(self._running.values()):
            self._end(child)

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            tree = children()
            for pid in [child.pid, *_below(tree, child.pid)] if child.poll() is None else ():
                _kill(pid)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(WAIT)  # a driver may hold a process that was killed inside of a hung kernel
            self._running.pop(child.pid, None)
            self._reap()

    def _reap(self) -> None:
        """End the orphans that became children of this process, and what they have started."""
        tree = children()
        for orphan in set(tree.get(os.getpid(), ())) - set(self._running):
            for pid in (orphan, *_below(tree, orphan)):
                _kill(pid)
            until = time.monotonic() + WAIT
            with suppress(ChildProcessError):
                while not os.waitpid(orphan, os.WNOHANG)[0] and time.monotonic() < until:
                    time.sleep(0.01)


def children() -> dict[int, list[int]]:
    """Return the children of each process, from /proc."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(path.parent.name))
    return found


def _below(tree: Mapping[int, Sequence[int]], root: int) -> list[int]:
    found = list(tree.get(root, ()))
    for pid in found:  # grows while it is read
        found += tree.get(pid, ())
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
