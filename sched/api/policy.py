"""What a policy sees, and what it may say. A policy is a pure function of a View in a file of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple, Protocol

import numpy as np

from .errors import InvalidValue, short
from .perf import Array, PerfModel
from .request import RequestView

Order = np.ndarray[tuple[int], np.dtype[np.intp]]  # row numbers


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def roles_of(given: Sequence[str] | Mapping[int, str], instances: int) -> dict[int, Role]:
    """Roles by instance, from the names of the roles of all of them, or of some by index. Raises InvalidValue."""
    if not isinstance(given, Mapping):
        if isinstance(given, str) or len(given) != instances:
            raise InvalidValue(f"roles={short(given)} must be a list of {instances}, one for each instance", "roles")
        given = dict(enumerate(given))
    allowed = [role.value for role in Role]
    for index, name in given.items():
        if name not in allowed:
            raise InvalidValue(
                f"role={short(name)} of instance {short(index)} must be one of {', '.join(allowed)}", "role"
            )
    return {index: Role(name) for index, name in given.items()}


class QueueView(Protocol):
    """Requests ordered by (priority, arrival, id), as objects and as numpy columns (one row each, read-only)."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RequestView]: ...
    def __getitem__(self, row: int) -> RequestView: ...
    @property
    def version(self) -> int:
        """The rows and their columns are what they were as long as this is."""

    @property
    def members(self) -> int:
        """The rows are what they were as long as this is, and of their columns those that nothing changes: arrival,
        ttft, tbt, best_effort."""

    @property
    def standard(self) -> int:
        """How many rows are not best effort: they come first."""

    @property
    def arrival(self) -> Array: ...
    @property
    def ttft(self) -> Array: ...
    @property
    def tbt(self) -> Array:
        """inf where none was promised."""

    @property
    def tpot(self) -> Array:
        """tpot of the stage that the next token belongs to."""

    @property
    def tightest(self) -> Array:
        """The least tpot of that stage and those still to come."""

    def last(self, order: Order) -> Array:
        """When the last token of these rows came out; nan before the first."""

    @property
    def deadline(self) -> Array:
        """When the next token is due."""

    @property
    def remaining(self) -> Array:
        """Tokens to compute before the next token is sampled."""

    @property
    def context(self) -> Array:
        """Tokens already in the cache."""

    @property
    def length(self) -> Array:
        """Prompt length."""

    @property
    def running(self) -> Array:
        """1 where the request holds a slot and pages, 0 where it waits for them."""

    @property
    def hit(self) -> Array:
        """Of `remaining`, what a waiting request is expected to find in the prefix cache."""

    @property
    def best_effort(self) -> Array:
        """1 where the request is served from what the others leave."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may not exceed."""

    tokens: int = 8192  # new tokens in a step (max_num_batched_tokens): the chunk budget C
    rows: int = 256  # requests with a slot (max_num_seqs)
    pages: int = 0  # pages of the pool
    page_size: int = 16
    prompts: int = 1 << 30  # prompts whose chunks may share a step; 1 is a chunk of one prompt
    preemptible: bool = False  # steps of prompt chunks alone can be stopped at a segment boundary
    suspended: int = 4  # steps stopped there at once: each keeps its activations
    stopping: float = 0.0  # share of a preemptible step that may still run after it was asked to stop (boundary.py)
    draft: int = 0  # tokens that a row may draft and verify in a step
    history: bool = False  # the executor must know every request's tokens: it drafts from them


class Task(NamedTuple):
    """A step that is under way, or that was stopped at a segment boundary."""

    step: int
    requests: tuple[RequestView, ...]  # those not over
    seconds: float  # predicted to be left
    total: float = 0.0  # predicted seconds of the whole step
    since: float = 0.0  # of the running step: when it began, or went on


@dataclass(frozen=True, slots=True)
class View:
    """Everything a policy may see, at one moment, of one instance."""

    now: float  # the clock, read once for this decision
    start: float  # when the step planned now can begin (later than `now` while one is running)
    role: Role
    prefill: QueueView  # prompt work left, or KV dropped and to be computed again
    decode: QueueView  # one token left to compute: a decode step each
    limits: Limits
    free_pages: int  # free or idle: to be had without dropping anybody
    free_slots: int  # held by nobody, in a table or not, and not reserved for who is on the way
    kv_waiting: int  # requests that wait for pages of this instance
    perf: PerfModel
    suspended: tuple[Task, ...] = ()  # oldest first; their requests are in neither table
    running: Task | None = None  # set where the question is whether to stop the step under way
    acceptance: float = 0.0  # share of drafted tokens that were right, as measured lately
    drift: float = 1.0  # how much longer than predicted steps took lately; 1.0 where predictions are about right
    decoded: bool = False  # the step planned last decodes rows


class Grant(NamedTuple):
    """Compute up to `tokens` tokens of a request in this step; where it decodes, `draft` more are drafted first."""

    request: int
    tokens: int
    draft: int = 0


def one_each(requests: Iterable[RequestView]) -> tuple[Grant, ...]:
    """One token for each of some requests. Most grants are such: Grant(...) takes twice as long."""
    new = tuple.__new__
    return tuple([new(Grant, (request.id, 1, 0)) for request in requests])


@dataclass(frozen=True, slots=True)
class Decision:
    """Grants, most important first: pages are given in this order and taken back from its end.

    A policy cannot leak a page, break a limit or lose a request: grants beyond a limit are cut, requests it
    does not name wait. `demote` makes requests best effort. `resume` goes on with a suspended step instead of the
    grants. `preempt` stops the running step at its next boundary; heeded only where the view shows one. `prompts`
    says how many prompts share the step, where that is fewer than the limits allow: the first granted that have
    pages and a slot, or get them. `separate`: prompts and running decodes do not share the step; it is of the kind of
    the first grant that gets in. `again`: when to ask the policy again whether to stop the step, should it be
    preemptible and still run then; besides, it is asked at every arrival and completion.
    """

    grants: tuple[Grant, ...] = ()
    demote: tuple[int, ...] = ()
    resume: int | None = None
    preempt: bool = False
    prompts: int = 1 << 30
    separate: bool = False
    again: float = inf


def whole(rows: QueueView, order: Order) -> tuple[Grant, ...]:
    """All that is left of each request, in an order of rows."""
    new, left = tuple.__new__, rows.remaining[order].astype(int).tolist()
    return tuple([new(Grant, (rows[row].id, tokens, 0)) for row, tokens in zip(order.tolist(), left, strict=True)])


def in_order(rows: QueueView, order: Order, limits: Limits) -> tuple[Grant, ...]:
    """Grants of all that is left of each request, in an order of rows.

    Of those that wait only the first `limits.rows` are named: no plan has room for more. Those that run are all
    named, since they can go on where nobody new can be let in.
    """
    if len(order) > limits.rows:
        order = order[(rows.running[order] > 0) | (np.arange(len(order)) < limits.rows)]
    return whole(rows, order)


class Policy(Protocol):
    def decide(self, view: View) -> Decision: ...
