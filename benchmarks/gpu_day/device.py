"""The device's lock: several checks may run on it, or one measurement alone. Compilation needs no lock."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_SH, flock
from pathlib import Path


class Device:
    """One process's access to the device. Locks end with their process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def shared(self, seconds: float) -> Iterator[None]:
        """Use the device beside others. After these seconds inside, the process is killed: a kernel hangs."""
        with self._held(LOCK_SH, seconds):
            yield

    @contextmanager
    def alone(self, seconds: float) -> Iterator[None]:
        """Use the device while no other process does."""
        with self._held(LOCK_EX, seconds):
            yield

    @contextmanager
    def _held(self, kind: int, seconds: float) -> Iterator[None]:
        # A process that waits at the door holds up later ones, so that none waits forever.
        with (self._folder / "device.room").open("w") as room:
            with (self._folder / "device.door").open("w") as door:
                flock(door, LOCK_EX)
                flock(room, kind)
            with limited(seconds):
                yield


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Let SIGALRM kill this process unless the block ends within these seconds: a hung kernel heeds nothing else."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
