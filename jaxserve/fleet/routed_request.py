"""A request on several engines: where it is, and what has arrived for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.errors import JaxserveError
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.plan import Delta
from jaxserve.sched.api.request import Request


class Stage(Enum):
    """Where a request is. It may go back from any stage but the last to another engine, if its own is lost or full."""

    QUEUED = "queued"  # at no engine
    FIRST = "first"  # at one that computes its first token, and then hands it over
    RUNNING = "running"  # at one that computes all of it, or all that is left
    OVER = "over"


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """Writer: its Dispatcher."""

    id: int  # here
    asked: NewRequest  # with a seed
    arrival: float  # seconds, of time.monotonic
    on_delta: Callable[[Delta], None]
    stage: Stage = Stage.QUEUED
    seen: Request = field(init=False)  # what the router sees
    output: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # when they arrived
    scored: int = 0  # prompt positions with log-probabilities
    engine: RemoteEngine | None = None
    remote: int = -1  # its id there
    tried: list[RemoteEngine] = field(default_factory=list)  # engines that were lost with it, or had no room
    target: int | None = None  # the instance that continues after the first token
    kv_from: str = ""  # where the KV of its prompt was computed
    cancelled: str | None = None
    metrics: RequestMetrics | None = None
    refusal: JaxserveError | None = None

    def __post_init__(self) -> None:
        self.seen = Request(self.id, self.asked, self.arrival)
        self.seen.output = self.output
        before = self.asked.progress
        if before is not None:
            now = time.monotonic()
            self.output += before.output
            self.scored = before.scored
            self.times = [now - before.first, now - before.last] if before.output else []

    def send(self, engine: RemoteEngine, kv: tuple[str, int], told: Callable[[Delta], None]) -> None:
        """Send it to an engine, with its progress so far. kv: where pages are, and of how many tokens."""
        now, kv_from, kv_tokens = time.monotonic(), *kv
        request = replace(
            self.asked, waited=now - self.arrival, progress=self._progress(now), kv_from=kv_from, kv_tokens=kv_tokens,
            handed_over=self.stage is Stage.FIRST,
        )  # fmt: skip
        self.engine, self.remote = engine, engine.submit(request, told)

    def _progress(self, now: float) -> Progress | None:
        """Return what the next engine must know; None for a request without a beginning."""
        if not self.output and not self.scored:
            return None
        first, last = (now - self.times[0], now - self.times[-1]) if self.times else (0.0, 0.0)
        return Progress(tuple(self.output), first, last, self.scored)

    def receive(self, delta: Delta) -> None:
        """Keep what an engine says of it."""
        if delta.tokens:
            self.output += delta.tokens
            self.times.append(time.monotonic())
        self.scored += len(delta.prompt_logprobs)
        if delta.finish_reason is not None and self.engine is not None:
            self.metrics, self.refusal = self.engine.record(self.remote), self.engine.refusal(self.remote)

    def pass_on(self, delta: Delta) -> None:
        """Tell what asked for it."""
        self.on_delta(delta._replace(request=self.id))
