"""The feed of snapshots: made once for all viewers, and only while there are viewers."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from jaxserve.engine.runtime.flight_recorder import EndedRequest, Event, Recent, RequestLife
from jaxserve.engine.runtime.info import Stats
from jaxserve.errors import short
from jaxserve.fleet.replicas import Replicas
from jaxserve.report.snapshot_form import LATELY
from jaxserve.server.failures import Refused
from jaxserve.server.keys import Keys
from jaxserve.server.snapshot import Reading, present_request, public_id, snapshot
from jaxserve.server.sse import Dialect, event

PERIOD = 1.0  # seconds between two snapshots
UNREAD = 8  # snapshots that may wait for a viewer; with one more, its stream ends
VIEWERS = 100  # at a time
KEPT = 2000  # ended requests in `lately`, at most
EVENTS = 100  # latest events in a snapshot, at most
ALONE = -1  # number of the replica of a server with one engine
_ID = re.compile(r"(?:([0-9]{1,18})-)?([0-9]{1,18})")  # of a request, after that of its replica: see `public_id`


class Encoded(Dialect):
    """Writes objects that hold their event, encoded once for all viewers."""

    end = b""

    def item(self, data: Mapping[str, Any]) -> bytes:
        encoded: bytes = data["event"]
        return encoded


class Viewer:
    """One viewer. Writer: the LiveFeed."""

    def __init__(self, client: str | None) -> None:
        self.client = client  # sees what is its own; None: everything
        self.waiting: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD)
        self.ended = asyncio.Event()  # it does not read, or the server ends


class LiveFeed:
    """Takes snapshots every PERIOD while there are viewers. Writer: the server's event loop."""

    def __init__(self, engine: Any, keys: Keys, model: str, draining: Callable[[], bool]) -> None:
        self._engine, self._keys, self._model, self._draining = engine, keys, model, draining
        self._viewers = set[Viewer]()
        self._task: asyncio.Task[None] | None = None
        self._numbers: dict[int, int] = {}  # of the last Recent of each replica
        self._lately: deque[tuple[float, EndedRequest]] = deque(maxlen=KEPT)  # with the monotonic time of the end
        self._before: tuple[float, Stats] | None = None

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @property
    def idle(self) -> bool:
        """Whether no snapshots are made, because there are no viewers."""
        return self._task is None or self._task.done()

    def client(self, name: str) -> str | None:
        """Return whose requests the client of an API key sees: its own if there are several, else None for all."""
        return name if len(self._keys.names) > 1 else None

    def join(self, client: str | None) -> Viewer:
        """Add a viewer, whose `stream` must be read. Raises Refused (429) for one too many."""
        if len(self._viewers) >= VIEWERS:
            text = f"{len(self._viewers)} viewers, the most that this server has at a time: try again later"
            raise Refused(429, text, code="too_many_viewers", retry_after=5.0)
        viewer = Viewer(client)
        self._viewers.add(viewer)
        if self.idle:
            self._task = asyncio.ensure_future(self._run())
        return viewer

    async def stream(self, viewer: Viewer) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the snapshots of a viewer, for `Encoded`."""
        try:
            while (encoded := await viewer.waiting.get()) is not None:
                yield {"event": encoded}
        finally:
            self._viewers.discard(viewer)

    async def _run(self) -> None:
        try:
            while self._viewers and not self._draining():
                self._send_all(await self._read())
                await asyncio.sleep(PERIOD)
        finally:
            for viewer in list(self._viewers):  # a stream must not hold up the end of the server
                self._send(viewer, None)
            self._before = None

    def _send_all(self, reading: Reading) -> None:
        encoded: dict[str | None, bytes] = {}
        for viewer in list(self._viewers):
            if viewer.client not in encoded:
                encoded[viewer.client] = event(snapshot(reading, self._engine.info, self._model, viewer.client))
            self._send(viewer, encoded[viewer.client])

    def _send(self, viewer: Viewer, encoded: bytes | None) -> None:
        try:
            viewer.waiting.put_nowait(encoded)
        except asyncio.QueueFull:
            viewer.ended.set()
            self._viewers.discard(viewer)

    async def _read(self) -> Reading:
        await self._engine.refresh()
        reports = await recent(self._engine, self._numbers)
        now, clock, stats = time.time(), time.monotonic(), self._engine.stats()
        events, ended = list[tuple[int, Event]](), list[tuple[int, EndedRequest]]()
        for replica, report in reports.items():
            self._numbers[replica] = report.number
            events += ((replica, one) for one in report.events)
            ended += ((replica, request) for request in report.requests)
        events.sort(key=lambda one: -one[1].ago)
        ended.sort(key=lambda request: -request[1].ago)
        self._lately.extend((clock - request.ago, request) for _, request in ended)
        while self._lately and self._lately[0][0] < clock - LATELY:
            self._lately.popleft()
        at, before = self._before or (clock, None)
        self._before = clock, stats
        lately = tuple(request for _, request in self._lately)
        return Reading(now, clock - at, stats, before, events[-EVENTS:], ended, lately)


async def recent(engine: Any, since: Mapping[int, int]) -> dict[int, Recent]:
    """Return what has happened, by the number of the replica, since the numbers that earlier ones had."""
    if not isinstance(engine, Replicas):
        return {ALONE: await engine.recent(since.get(ALONE, 0))}
    engines = dict(engine.engines)
    numbers = {at: ALONE if engine.members.slots == 1 else at for at in engines}
    reports = await asyncio.gather(*(replica.recent(since.get(numbers[at], 0)) for at, replica in engines.items()))
    return dict(zip(numbers.values(), reports, strict=True))


async def present_requests(engine: Any, client: str | None, limit: int) -> dict[str, Any]:
    """Return the latest ended requests that a client sees, newest first."""
    reports, now = await recent(engine, {}), time.time()
    each = [(request.ago, replica, request) for replica, part in reports.items() for request in part.requests]
    seen = sorted((entry for entry in each if client is None or entry[2].client == client), key=lambda entry: entry[0])
    return {"object": "list", "data": [present_request(now, replica, request) for _, replica, request in seen[:limit]]}


async def life_of(engine: Any, id: str, client: str | None) -> RequestLife:
    """Return what is known of a request, by its id or, once it has ended, by the id of its answer.

    Raises Refused (404) for one that is unknown, or not the client's.
    """
    life: RequestLife | None = None
    name = id if _ID.fullmatch(id) else await _answered(engine, id, client)
    if named := _ID.fullmatch(name):
        at, number = ALONE if named[1] is None else int(named[1]), int(named[2])
        if not isinstance(engine, Replicas):
            life = await engine.life(number, client) if at == ALONE else None
        elif (replica := engine.engines.get(0 if at == ALONE else at)) is not None:
            life = await replica.life(number, client)
    if life is None:
        text = f"no request {short(id)} is recorded: see GET /v1/requests for those that are"
        raise Refused(404, text, code="request_not_found")
    return life


async def _answered(engine: Any, answer: str, client: str | None) -> str:
    """Return the id of the latest ended request of a client whose answer had this id; "" if none is recorded."""
    reports = await recent(engine, {})
    ids = {
        request.ago: public_id(replica, request.id)
        for replica, part in reports.items()
        for request in part.requests
        if request.key == answer and (client is None or request.client == client)
    }
    return ids[min(ids)] if ids else ""
