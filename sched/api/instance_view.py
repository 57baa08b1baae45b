"""The read-only view of an instance for routers and admission controls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from .perf import PerfModel
from .policy import Limits, Role, View
from .request import Request, RequestView

T = TypeVar("T")


class InstanceView(Protocol):
    """One instance, read-only: its role, load, queues and predictions. Iterating yields its requests."""

    @property
    def role(self) -> Role: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def perf(self) -> PerfModel: ...
    @property
    def ends(self) -> float: ...  # predicted end of the submitted steps, seconds
    @property
    def hung(self) -> bool: ...  # its oldest step does not end
    @property
    def accepting(self) -> bool: ...  # takes new requests: does not hang, and its process does not drain
    @property
    def kv_waiting(self) -> int: ...  # requests of other instances that wait for KV pages here
    @property
    def running(self) -> int: ...  # requests that hold a slot
    @property
    def waiting(self) -> int: ...
    @property
    def prefill_backlog(self) -> int: ...  # prompt tokens to compute, without expected prefix hits
    @property
    def decode_context(self) -> int: ...  # total context of the running decodes, in tokens
    @property
    def steps(self) -> int: ...  # completed steps
    @property
    def version(self) -> Hashable: ...  # changes whenever `view` changes other than by time
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RequestView]: ...
    def cached_tokens(self, request: Request) -> int:
        """Return how many prompt tokens of a request are in the prefix cache of the instance."""

    def view(self, now: float, start: float) -> View:
        """Return the view that the policy would get for a step that begins at `start`."""


class ReadOnlyView:
    """An InstanceView of another one, such as a live Scheduler, that offers nothing else."""

    __slots__ = ("__weakref__", "_instance")

    def __init__(self, instance: InstanceView) -> None:
        self._instance = instance

    @property
    def role(self) -> Role:
        return self._instance.role

    @property
    def limits(self) -> Limits:
        return self._instance.limits

    @property
    def perf(self) -> PerfModel:
        return self._instance.perf

    @property
    def ends(self) -> float:
        return self._instance.ends

    @property
    def hung(self) -> bool:
        return self._instance.hung

    @property
    def accepting(self) -> bool:
        return self._instance.accepting

    @property
    def kv_waiting(self) -> int:
        return self._instance.kv_waiting

    @property
    def running(self) -> int:
        return self._instance.running

    @property
    def waiting(self) -> int:
        return self._instance.waiting

    @property
    def prefill_backlog(self) -> int:
        return self._instance.prefill_backlog

    @property
    def decode_context(self) -> int:
        return self._instance.decode_context

    @property
    def steps(self) -> int:
        return self._instance.steps

    @property
    def version(self) -> Hashable:
        return self._instance.version

    def __len__(self) -> int:
        return len(self._instance)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._instance)

    def cached_tokens(self, request: Request) -> int:
        return self._instance.cached_tokens(request)

    def view(self, now: float, start: float) -> View:
        return self._instance.view(now, start)


class InstanceMemo(Generic[T]):
    """A per-instance memo of `compute(instance, start)`, invalidated when the instance changes.

    `start` is the earliest time at which its next step can begin. `compute` may read the `view` of
    the instance and nothing else.
    """

    def __init__(self, compute: Callable[[InstanceView, float], T]) -> None:
        self._compute = compute
        self._memo: WeakKeyDictionary[InstanceView, tuple[Hashable, T]] = WeakKeyDictionary()

    def of(self, instance: InstanceView, now: float) -> T:
        """Return the result for an instance, computed again only if the instance changed."""
        start = max(now, instance.ends)
        state = (start, instance.version)
        before = self._memo.get(instance)
        if before is not None and before[0] == state:
            return before[1]
        result = self._compute(instance, start)
        self._memo[instance] = state, result
        return result
