"""The interface of policies. A policy is a pure function from a View to a Decision."""

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

MIXED_SHARE = 0.75  # a request that joins the decodes waits for the running mixed step
Order = np.ndarray[tuple[int], np.dtype[np.intp]]  # row numbers


class Role(Enum):
    """What an instance does: prefill, decode, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


def roles_of(given: Sequence[str] | Mapping[int, str], instances: int) -> dict[int, Role]:
    """Return the roles by instance, from role names for all instances or for some by index.

    Raises InvalidValue.
    """
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
    """Requests ordered by (priority, arrival, id), as objects and as read-only numpy columns."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[RequestView]: ...
    def __getitem__(self, row: int) -> RequestView: ...
    @property
    def version(self) -> int:
        """A number that changes whenever a row or a column changes."""

    @property
    def members(self) -> int:
        """A number that changes whenever a row is added or removed.

        While it is unchanged, so are the columns that are constant per request: arrival, ttft, tbt
        and best_effort.
        """

    @property
    def standard(self) -> int:
        """How many rows are not best effort. They come first."""

    @property
    def arrival(self) -> Array: ...
    @property
    def ttft(self) -> Array: ...
    @property
    def tbt(self) -> Array:
        """The largest gap allowed between two tokens, in seconds; inf if the request has no such objective."""

    @property
    def tpot(self) -> Array:
        """The tpot of the stage of the next token, in seconds."""

    @property
    def tightest(self) -> Array:
        """The least tpot of the current stage and the stages to come, in seconds."""

    def last(self, order: Order) -> Array:
        """Return the times of the last token of these rows; nan before the first token."""

    @property
    def deadline(self) -> Array:
        """Deadlines of the next token."""

    @property
    def remaining(self) -> Array:
        """Tokens to compute before the next token can be sampled."""

    @property
    def context(self) -> Array:
        """Tokens whose KV is in the cache."""

    @property
    def length(self) -> Array:
        """Prompt lengths."""

    @property
    def running(self) -> Array:
        """1 if the request holds a slot and pages, 0 if it waits for them."""

    @property
    def hit(self) -> Array:
        """How many of the `remaining` tokens of a waiting request are expected to be in the prefix cache."""

    @property
    def best_effort(self) -> Array:
        """0 if the objectives of the request count, 1 after a demotion, 2 if it asked for best effort."""

    @property
    def weight(self) -> Array:
        """What it counts where not all can be on time (`SLO.weight`)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a step plan."""

    tokens: int = 8192  # new tokens per step (max_num_batched_tokens): the chunk budget C
    rows: int = 256  # requests that hold a slot (max_num_seqs)
    pages: int = 0  # pages in the pool
    page_size: int = 16
    prompts: int = 1 << 30  # prompts with a chunk in the same step; 1: no two prompts share a step
    preemptible: bool = False  # prefill-only steps can be stopped at a segment boundary
    suspended: int = 4  # suspended steps at a time: each keeps its activations
    stopping: float = 0.0  # share of a preemptible step that may still run after a request to stop (preemption.py)
    stop_within: float | None = None  # seconds: chunks are cut so that a request to stop waits no longer
    draft: int = 0  # tokens that a request may draft and verify per step
    history: bool = False  # the executor needs the tokens of every request, because it drafts from them
    stairs: tuple[int, ...] = ()  # sizes in tokens, ascending, that steps with prompt tokens are padded to; (): none
    cascade: bool = False  # the executor reads a prefix that rows share once
    mixed_share: float = MIXED_SHARE  # of the tightest TPOT and TBT, for a step with prompts on a decode instance
    session_share: float = 0.25  # most of the pages that sessions pin in the prefix cache between turns
    session_timeout: float = 60.0  # seconds after a turn for which its pages stay pinned


class Task(NamedTuple):
    """A step that is running or suspended."""

    step: int
    requests: tuple[RequestView, ...]  # those that have not finished
    seconds: float  # predicted to remain
    total: float = 0.0  # predicted seconds of the whole step
    since: float = 0.0  # when the running step began or resumed


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of one instance at one time."""

    now: float  # the clock, read once for this decision
    start: float  # when the step planned now can begin; later than `now` while a step is running
    role: Role
    prefill: QueueView  # requests with prompt tokens to compute, including KV that was dropped
    decode: QueueView  # running decodes: requests with one token to compute
    limits: Limits
    free_pages: int  # free or idle: can be allocated without dropping a request
    free_slots: int  # not held by a request, and not reserved for one that is being transferred
    kv_waiting: int  # requests of other instances that wait for pages here
    perf: PerfModel
    suspended: tuple[Task, ...] = ()  # oldest first; their requests are in neither queue
    running: Task | None = None  # set if the policy is asked whether to stop the running step
    acceptance: float = 0.0  # recent share of drafted tokens that were accepted
    drift: float = 1.0  # recent ratio of measured to predicted step time
    decoded: bool = False  # the last planned step contains decodes


class Grant(NamedTuple):
    """Up to `tokens` tokens of a request to compute in this step. A decode drafts `draft` more first."""

    request: int
    tokens: int
    draft: int = 0


def one_each(requests: Iterable[RequestView]) -> tuple[Grant, ...]:
    """Return a grant of one token for each request. This is the common grant, and `Grant(...)` is twice as slow."""
    new = tuple.__new__
    return tuple([new(Grant, (request.id, 1, 0)) for request in requests])


@dataclass(frozen=True, slots=True)
class Decision:
    """The grants of one step, most important first. Pages are allocated in this order, and taken back from the end.

    A policy cannot leak a page, exceed a limit or lose a request: grants beyond a limit are cut,
    and requests without a grant wait.

    `demote`: requests to make best effort. `resume`: the suspended step to resume instead of the
    grants. `preempt`: stop the running step at its next boundary (ignored if the view shows no
    running step).

    `prompts`: how many prompts may share the step, if fewer than the limits allow; they are the
    first granted prompts that have or get pages and a slot. `separate`: do not mix prompts and
    decodes in the step; the first grant that fits decides which of the two it contains.

    `again`: when to ask the policy again whether to stop the step, if it is preemptible and still
    running. The policy is also asked at every arrival and completion.
    """

    grants: tuple[Grant, ...] = ()
    demote: tuple[int, ...] = ()
    resume: int | None = None
    preempt: bool = False
    prompts: int = 1 << 30
    separate: bool = False
    again: float = inf


def whole(rows: QueueView, order: Order) -> tuple[Grant, ...]:
    """Return grants of all remaining tokens of each row, in the given order."""
    new, left = tuple.__new__, rows.remaining[order].astype(int).tolist()
    return tuple([new(Grant, (rows[row].id, tokens, 0)) for row, tokens in zip(order.tolist(), left, strict=True)])


def in_order(rows: QueueView, order: Order, limits: Limits) -> tuple[Grant, ...]:
    """Return grants of all remaining tokens of each row, in the given order, without hopeless ones.

    Only the first `limits.rows` waiting requests get one, since no plan has room for more. Every
    running request does, because it can go on even if no waiting request can start.
    """
    if len(order) > limits.rows:
        order = order[(rows.running[order] > 0) | (np.arange(len(order)) < limits.rows)]
    return whole(rows, order)


class Policy(Protocol):
    """A scheduling policy. `decide` must be a pure function of the view."""

    def decide(self, view: View) -> Decision: ...
