"""Restarts of all replicas, one after the other."""

from __future__ import annotations

import asyncio
import fcntl
from contextlib import AbstractContextManager, nullcontext

from jaxserve.fleet.members import RETRY
from jaxserve.fleet.replicas import Replicas
from jaxserve.sched.api.errors import InvalidValue, JaxserveError

CLAIM = "restart"  # a file that is locked while a front restarts replicas; the lock ends with its process
SETTLING = 4 * RETRY  # seconds in which other fronts find the replica that is back


class Rolling:
    """Restarts all replicas, one after the other, without a lost request. Writer: the loop of the replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self._task: asyncio.Task[None] | None = None
        self.restarted = 0  # replicas that are back since the last `start`

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self, patience: float) -> None:
        """Begin; each replica may take `patience` seconds to finish its requests, the rest continue elsewhere.

        Raises InvalidValue if there is one replica only, JaxserveError if a restart is in progress, also at
        another front of this machine.
        """
        count = len(self.replicas.engines)
        if count < 2:
            raise InvalidValue(
                f"replicas={count}: requests would be lost while the only engine starts; serve with --replicas 2 or "
                "more",
                "replicas",
            )
        if self.running:
            raise JaxserveError(f"a restart is in progress: {self.restarted} of {count} replicas are done")
        claim = self._claim()
        self.restarted = 0
        self._task = asyncio.ensure_future(self._run(patience, claim))

    def _claim(self) -> AbstractContextManager[object]:
        """Return a file that no other front can lock until it is closed, if fronts have a folder in common."""
        folder = self.replicas.members.folder
        if folder is None:
            return nullcontext()
        claim = (folder / CLAIM).open("wb")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            raise JaxserveError("a restart is in progress at another front") from None
        return claim

    async def _run(self, patience: float, claim: AbstractContextManager[object]) -> None:
        with claim:
            for replica in tuple(self.replicas.engines):
                await self.replicas.members.renew(replica, patience)
                self.restarted += 1
                await asyncio.sleep(SETTLING)

    def close(self) -> None:
        """Stop after what has been asked for already."""
        if self._task is not None:
            self._task.cancel()
