"""The one mutable record of a request. Writer: the Scheduler that owns it, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import Protocol

from .acceptance import Drafts
from .errors import InvalidValue
from .params import SamplingParams
from .slo import ANSWER, SLO, THINKING, deadline
from .thinking import ThinkingEnd

BEST_EFFORT = "best_effort"
STANDARD = "standard"


class State(Enum):
    WAITING = "waiting"  # holds no pages here (new, or its KV was dropped)
    RUNNING = "running"  # holds pages and a slot
    TRANSFERRING = "transferring"  # prompt done, KV held for another instance
    FINISHED = "finished"


class RequestView(Protocol):
    """What a policy may see of a request: read-only, and without the length of its output, which nobody knows."""

    @property
    def id(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def slo(self) -> SLO: ...
    @property
    def priority(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def computed(self) -> int: ...
    @property
    def remaining(self) -> int: ...
    @property
    def generated(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def last_token_at(self) -> float | None: ...
    @property
    def deadline(self) -> float: ...
    @property
    def acceptance(self) -> float: ...
    @property
    def drafts(self) -> bool: ...
    @property
    def state(self) -> State: ...
    @property
    def stage(self) -> str: ...
    @property
    def drafting(self) -> int: ...
    @property
    def drops(self) -> int: ...


class Request:
    """A request and its one cursor: `computed` tokens have KV in the cache, or will once all submitted steps end.

    Prompt chunk, decode token and draft to verify are the same thing: the cursor catching up with the known
    tokens (prompt + output + those sampled on the device but not yet back on the host).
    """

    __slots__ = (
        "arrival",
        "budget",
        "cached",
        "class_",
        "computed",
        "decodes_in_place",
        "digests",
        "drafted",
        "drafting",
        "drops",
        "eos",
        "error",
        "failures",
        "finish_reason",
        "first_token_at",
        "hit",
        "id",
        "inflight",
        "key",
        "limit",
        "on_device",
        "output",
        "pages",
        "params",
        "pending",
        "priority",
        "prompt",
        "prompt_length",
        "row",
        "salt",
        "scheduled_at",
        "scored",
        "seed",
        "sent_pages",
        "slo",
        "slot",
        "stage",
        "state",
        "stops",
        "suspended",
        "thinking",
        "tier",
        "token_times",
        "tpot",
        "trial",
    )

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        slo: SLO,
        arrival: float,
        *,
        seed: int = 0,
        priority: int = 0,
        tier: str = STANDARD,
        eos: frozenset[int] = frozenset(),
        thinking: ThinkingEnd | None = None,
        limit: int | None = None,
        key: str = "",
        salt: bytes = b"",
        class_: str = "",
    ) -> None:
        """`thinking` finds where the answer begins; None where the output begins with the answer. `class_`: what
        metrics call requests like it, which a change of its tier leaves alone."""
        self.id = id
        self.key = key or f"req-{id}"
        self.prompt = prompt
        self.prompt_length = len(prompt)
        self.params = params
        self.slo = slo
        self.arrival = arrival
        self.seed = seed
        self.priority = priority
        self.tier = tier
        self.class_ = class_
        self.eos = eos
        self.stops = frozenset(params.stop_token_ids) if params.ignore_eos else eos.union(params.stop_token_ids)
        self.salt = salt
        self.limit = params.max_tokens or (1 << 30) if limit is None else limit  # most tokens it may generate
        self.thinking = thinking if slo.stages else None  # None from the end of thinking on
        self.stage = ANSWER if self.thinking is None else THINKING
        self.tpot = slo.tpot_of(self.stage)  # seconds for a token of the stage that the next one belongs to

        self.state = State.WAITING
        self.output: list[int] = []
        self.pending = 0  # tokens sampled by submitted steps that are not back yet
        self.computed = 0
        self.scored = 0  # prompt positions whose log-probabilities are told
        self.cached = 0  # prompt tokens whose KV was found in the prefix cache at the first admission
        self.hit = 0  # known tokens that its instance's prefix cache holds while it waits
        self.row = 0  # where it was last seen in its table
        self.inflight = 0  # submitted spans whose result is not back
        self.decodes_in_place = False  # it decodes on an instance that prefills, until there is room for it elsewhere
        self.suspended = False  # its step was stopped at a segment boundary and has not gone on
        self.drafted = Drafts()  # how often they were right so far
        self.drafting = 0  # tokens drafted by the span in flight: how many hold is not known yet
        self.slot: int | None = None
        self.pages: list[int] = []
        self.on_device = False  # the last token is in the device-side carry of its slot
        self.sent_pages = 0  # how many of `pages` the slot has been told of
        self.digests: list[bytes] = []  # one per full page of known tokens, chained
        self.budget = 0.0  # seconds of tpot granted to the tokens after the first, see slo.deadline
        self.drops = 0  # times its KV was dropped
        self.failures = 0  # steps that raised while it was in them, since it last got beyond `trial`
        self.trial = 0  # position up to which it runs alone
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.token_times: list[float] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.state.value}, prompt={self.prompt_length}, computed={self.computed}, "
            f"output={len(self.output)}+{self.pending}, pages={len(self.pages)})"
        )

    @property
    def known(self) -> int:
        """Tokens that exist: prompt, output, and those still on the device."""
        return self.prompt_length + len(self.output) + self.pending

    @property
    def generated(self) -> int:
        return len(self.output) + self.pending

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 is a decode step."""
        return self.prompt_length + len(self.output) + self.pending - self.computed

    @property
    def context(self) -> int:
        """Tokens that the next span attends to before its own: the cursor."""
        return self.computed

    @property
    def comes_back(self) -> bool:
        """Its KV was dropped here; best effort waits for what the others leave."""
        return self.state is State.WAITING and self.drops > 0 and self.tier != BEST_EFFORT

    @property
    def finished_at(self) -> float | None:
        """When its last token came out."""
        return self.last_token_at

    @property
    def last_token_at(self) -> float | None:
        return self.token_times[-1] if self.token_times else None

    @property
    def deadline(self) -> float:
        """When its next token is due."""
        return deadline(self.slo, self.arrival, self.first_token_at, self.budget)

    @property
    def acceptance(self) -> float:
        """Chance that a token drafted for it is right."""
        return self.drafted.acceptance

    @property
    def drafts(self) -> bool:
        """Whether its next tokens may be drafted."""
        return self.params.drafts(self.generated)

    def token(self, position: int) -> int:
        """The token at a position that is known on the host."""
        if position < self.prompt_length:
            return self.prompt[position]
        return self.output[position - self.prompt_length]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known host tokens of positions [start, end)."""
        n = self.prompt_length
        if end <= n:
            return tuple(self.prompt[start:end])
        if start >= n:
            return tuple(self.output[start - n : end - n])
        return (*self.prompt[start:n], *self.output[: end - n])

    def gain(self, token: int, at: float) -> str | None:
        """A sampled token is back. Why the request ends with it, None where it goes on."""
        output = self.output
        self.pending -= 1
        output.append(token)
        self.token_times.append(at)
        if self.first_token_at is None:
            self.first_token_at = at
        if self.thinking is not None and self.thinking.feed(token):
            self.thinking = None
            self.switch_stage(ANSWER)
        if token in self.stops and len(output) >= self.params.min_tokens:
            return "stop"
        return "length" if len(output) >= self.limit else None

    def switch_stage(self, stage: str) -> None:
        """Tokens from here on are of another stage, those still on the device and the next one due included."""
        before = self.tpot
        self.stage = stage
        self.tpot = self.slo.tpot_of(stage)
        self._regrant(self.pending + 1, before, self.tpot)

    def take_back(self, tokens: int) -> None:
        """The last `tokens` tokens that steps were to sample are not sampled after all."""
        self._regrant(tokens, self.tpot, 0.0)
        self.pending -= tokens

    def _regrant(self, tokens: int, before: float, after: float) -> None:
        """Give the last `tokens` tokens that were granted `before` seconds each `after` seconds instead.

        Where a tpot is infinite the rest cannot be had by subtraction: inf - inf is no deadline.
        """
        if before < inf:
            self.budget += tokens * (after - before)
        elif tokens and self.generated <= tokens:
            self.budget = tokens * after if after > 0 else 0.0

    def wait_anew(self) -> None:
        """It goes to another instance without its KV; the tokens stay."""
        self.state, self.decodes_in_place = State.WAITING, False
        self.computed = self.drops = 0

    def forget_cache(self) -> None:
        """The pool it had pages in is gone, and with it what was submitted; the tokens stay."""
        self.pages, self.slot = [], None
        self.inflight = self.computed = self.sent_pages = self.drafting = 0
        self.suspended = False
        self.on_device = False
        self.take_back(self.pending)


def tightest(request: RequestView, tpot: float) -> float:
    """The least tpot of the stages that a request, now at one of `tpot`, has still to go through."""
    return min(tpot, request.slo.tpot_of(ANSWER)) if request.slo.stages else tpot


def check_prompt_length(length: int, context: int) -> None:
    """Raise InvalidValue if a prompt of `length` tokens is empty or fills the model's context of `context` tokens."""
    if length == 0:
        raise InvalidValue("the prompt is empty: at least one token is needed", "prompt")
    if length >= context:
        raise InvalidValue(
            f"the prompt has {length} tokens, and this model's context of {context} tokens must hold it and at least "
            "one token of output",
            "prompt",
        )
