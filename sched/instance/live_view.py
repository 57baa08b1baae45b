"""The InstanceView of a live Scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from ..api.perf import PerfModel
from ..api.policy import Limits, Role, View
from ..api.request import Request, RequestView
from .scheduler import Scheduler


class LiveView:
    """A read-only InstanceView of a Scheduler."""

    __slots__ = ("__weakref__", "_scheduler")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def role(self) -> Role:
        return self._scheduler.role

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    @property
    def perf(self) -> PerfModel:
        return self._scheduler.perf

    @property
    def ends(self) -> float:
        return self._scheduler.ends

    @property
    def hung(self) -> bool:
        return self._scheduler.hung

    @property
    def kv_waiting(self) -> int:
        return self._scheduler.kv_waiting

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting

    @property
    def prefill_backlog(self) -> int:
        return self._scheduler.prefill_backlog

    @property
    def decode_context(self) -> int:
        return self._scheduler.decode_context

    @property
    def steps(self) -> int:
        return self._scheduler.steps

    @property
    def version(self) -> Hashable:
        return self._scheduler.version

    def __len__(self) -> int:
        return len(self._scheduler)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._scheduler)

    def cached_tokens(self, request: Request) -> int:
        return self._scheduler.cached_tokens(request)

    def view(self, now: float, start: float) -> View:
        return self._scheduler.view(now, start)
