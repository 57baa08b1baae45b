"""Several engines of the same model, used as one: the methods of `RemoteEngine`, over all replicas."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.fleet.board import Board
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.members import Members
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.sched.api.errors import InvalidValue, JaxserveError, Unavailable
from jaxserve.sched.api.policy import Role
from jaxserve.wire.address import Place

log = logging.getLogger(__name__)

ROUTER = "unified"


class Replicas(Dispatcher):
    """Engines in other processes as one engine. All methods belong to one loop, as those of RemoteEngine."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine | None],
        seed: str = "0",
        router: str = ROUTER,
        fronts: int = 1,
    ) -> None:
        """Use connected engines, by the numbers of their replicas; None: one that may `join` later.

        The seeds of requests without one come from `seed`. `router`: by name. Raises InvalidValue if the engines do
        not serve the same model in the same way, or there is none.
        """
        super().__init__(Members(engines, router, fronts, zlib.crc32(seed.encode())), seed)

    @classmethod
    async def connect(
        cls,
        places: Sequence[Place],
        seed: str = "0",
        router: str = ROUTER,
        fronts: int = 1,
        *,
        partly: bool = False,
    ) -> Replicas:
        """Connect to engines that are ready, and to each that comes, or comes back, later.

        partly: some may not run yet, but one must. Raises InvalidValue if one does not answer, or differs from the
        others.
        """
        engines = [await _connected(place) if partly else await RemoteEngine.connect(*place) for place in places]
        replicas = cls(engines, seed, router, fronts)
        replicas.members.folder = places[0].address.folder
        for at, place in enumerate(places):
            replicas.members.watch(at, place)
        return replicas

    def check_outputs(self, prompts: int, n: int) -> None:
        """Raise InvalidValue if the queues can never hold `n` outputs of each of `prompts` prompts."""
        self.members.like.check_outputs(prompts, n, sum(engine.entries for engine in self.engines.values()))

    @property
    def engines(self) -> Mapping[int, RemoteEngine]:
        """The engine of each replica that has one; it may be lost."""
        return self.members.engines

    @property
    def info(self) -> EngineInfo:
        return self.members.info

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for engine in self.engines.values() for role in engine.roles)

    @property
    def healthy(self) -> bool:
        return self.ailment is None

    @property
    def ailment(self) -> str | None:
        return self.members.ailment

    def stats(self) -> Stats:
        """Return the sum of the engines' last snapshots, and of what those that have ended had counted."""
        several, state = self.engines.values(), None if self.board is None else self.board.state()
        return replace(
            self.members.stats(),
            replicas=sum(engine.healthy for engine in several),
            replicas_draining=sum(engine.leaving and not engine.lost for engine in several),
            replicas_wanted=self.members.slots if state is None else state.wanted,
        )

    @property
    def board(self) -> Board | None:
        """Where the process that starts engines says how many there are; None: nowhere."""
        folder = self.members.folder
        return None if folder is None else Board(folder)

    async def refresh(self) -> None:
        await asyncio.gather(*(engine.refresh() for engine in self.engines.values()))

    def set_roles(self, roles: Mapping[int, Role]) -> tuple[Role, ...]:
        """Set the roles of instances, as `Engine.set_roles`; called from another thread.

        Instances are numbered over all replicas. Replicas before one that refuses keep their new roles.
        """
        engines = tuple(self.engines.values())
        places = [(engine, at) for engine in engines for at in range(len(engine.roles))]
        if unknown := set(roles) - set(range(len(places))):
            raise InvalidValue(f"instance={min(unknown)!r} must be 0 to {len(places) - 1}", "instance")
        if any(engine.kv for engine in engines):
            check_replica_roles(roles.get(at, role) for at, role in enumerate(self.roles))
        for engine in engines:
            own = {at: roles[number] for number, (one, at) in enumerate(places) if one is engine and number in roles}
            if own:
                engine.set_roles(own)
        return self.roles

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix caches of all engines; False if one could not."""
        emptied = [engine.reset_prefix_cache() for engine in tuple(self.engines.values())]
        return all(emptied)

    def end_session(self, session: str) -> bool:
        """Release the pages of a session in all engines; return whether one kept any."""
        kept = False
        for engine in tuple(self.engines.values()):
            with suppress(Unavailable):  # what is lost keeps nothing
                kept |= engine.end_session(session)
        return kept

    def profile(self, on: bool) -> bool:
        """Start or end traces of all engines. Raises the error of the first that fails, after asking all."""
        failures = []
        for engine in tuple(self.engines.values()):
            try:
                engine.profile(on)
            except JaxserveError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return True

    def close(self) -> bool:
        return self.members.close()


async def _connected(place: Place) -> RemoteEngine | None:
    try:
        return await RemoteEngine.connect(*place)
    except InvalidValue as error:
        log.debug("%s is not there: %s", place.name, error)
        return None


def check_replica_roles(roles: Iterable[Role]) -> None:
    """Raise InvalidValue if no replica of these roles would prefill, or none decode."""
    given = [role.value for role in roles]
    if set(given) in ({Role.PREFILL.value}, {Role.DECODE.value}):
        raise InvalidValue(f"roles={given} are incomplete: some replica must prefill and some must decode", "roles")
