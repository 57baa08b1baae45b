"""The one mutable record of a request. Writer: the one Scheduler that owns it at the time."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Protocol

from .acceptance import Drafts
from .errors import InvalidValue
from .new_request import NewRequest, Progress
from .pooling import Pooled
from .slo import ANSWER, SLO, THINKING, deadline
from .thinking import ThinkingEnd

BEST_EFFORT = "best_effort"


class State(Enum):
    """The state of a request on its instance."""

    WAITING = "waiting"  # holds no pages here: new, or its KV was dropped
    RUNNING = "running"  # holds pages and a slot
    TRANSFERRING = "transferring"  # prompt computed, KV held until it is on another instance
    FINISHED = "finished"


class RequestView(Protocol):
    """The read-only view of a request for policies. Its output length is unknown, so it is not here."""

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
    def best_effort(self) -> int:
        """0 if its objectives count, 1 after a demotion, 2 if it asked for best effort: served in this order."""

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
    def held(self) -> bool: ...
    @property
    def drops(self) -> int: ...


class Request:
    """A request with one cursor: `computed` tokens have KV in the cache, or will once all submitted steps end.

    A prompt chunk, a decode token and a draft to verify are all the cursor catching up with the
    known tokens: prompt, output, and tokens sampled on the device that are not on the host yet.
    """

    __slots__ = (
        "arrival",
        "asked",
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
        "held",
        "hit",
        "id",
        "inflight",
        "limit",
        "on_device",
        "output",
        "pages",
        "params",
        "pending",
        "pooled",
        "priority",
        "prompt",
        "prompt_length",
        "row",
        "scheduled_at",
        "scored",
        "seed",
        "sent_pages",
        "slo",
        "slot",
        "slow",
        "stage",
        "state",
        "stops",
        "suspended",
        "thinking",
        "tier",
        "token_times",
        "tpot",
        "transferred_at",
        "trial",
    )

    def __init__(
        self,
        id: int,
        asked: NewRequest,
        arrival: float,
        *,
        seed: int = 0,
        eos: frozenset[int] = frozenset(),
        thinking: ThinkingEnd | None = None,
        limit: int | None = None,
        class_: str = "",
    ) -> None:
        """Create a waiting request.

        `thinking` detects the end of thinking in the output; None if the output starts with the
        answer. `class_` is the label of the request in metrics, which stays the same if its tier changes.
        """
        params, slo = asked.params, asked.slo
        self.id = id
        self.asked = asked
        self.prompt = asked.prompt
        self.prompt_length = len(asked.prompt)
        self.params = params
        self.slo = slo
        self.arrival = arrival
        self.seed = seed
        self.priority = asked.priority
        self.tier = asked.tier
        self.class_ = class_
        self.eos = eos
        self.stops = frozenset(params.stop_token_ids) if params.ignore_eos else eos.union(params.stop_token_ids)
        self.limit = params.max_tokens or (1 << 30) if limit is None else limit  # most tokens to generate
        self.thinking = thinking if slo.stages else None  # None once thinking has ended
        self.stage = ANSWER if self.thinking is None else THINKING
        self.tpot = slo.tpot_of(self.stage)  # seconds per token in the stage of the next token

        self.state = State.WAITING
        self.output: list[int] = []
        self.pending = 0  # tokens sampled by submitted steps that are not on the host yet
        self.computed = 0
        self.scored = 0  # prompt positions with reported log-probabilities
        self.pooled = None if params.pooling is None else Pooled(params.pooling)
        self.cached = 0  # prompt tokens found in the prefix cache at the first admission
        self.hit = 0  # known tokens in the prefix cache of its instance, while it waits
        self.row = 0  # its last known row in its queue
        self.inflight = 0  # submitted spans without a result yet
        self.decodes_in_place = False  # decodes on a prefill instance until a decode instance has room
        self.suspended = False  # its step is suspended at a segment boundary
        self.slow = False  # what it may sample takes long to find out, so it is in one step at a time
        self.held = False  # it is slow, and in a step or not ready for the next one
        self.drafted = Drafts()  # acceptance of its drafts so far
        self.drafting = 0  # tokens drafted by the span in flight, not verified yet
        self.slot: int | None = None
        self.pages: list[int] = []
        self.on_device = False  # the last token is in the device-side carry of its slot
        self.sent_pages = 0  # how many of `pages` were sent to the slot
        self.digests: list[bytes] = []  # one per full page of known tokens, chained
        self.budget = 0.0  # seconds of tpot for the tokens after the first, see slo.deadline
        self.drops = 0  # times its KV was dropped
        self.failures = 0  # steps that raised with it in them, since it last got beyond `trial`
        self.trial = 0  # position up to which it runs alone
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.transferred_at: float | None = None  # when its KV was last on another instance than before
        self.token_times: list[float] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.id}, {self.state.value}, prompt={self.prompt_length}, computed={self.computed}, "
            f"output={len(self.output)}+{self.pending}, pages={len(self.pages)})"
        )

    @property
    def key(self) -> str:
        """Its name in logs and journals."""
        return self.asked.key or f"req-{self.id}"

    @property
    def known(self) -> int:
        """Tokens that exist: prompt, output, and those still on the device only."""
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
        """Tokens before the next span: the cursor."""
        return self.computed

    @property
    def best_effort(self) -> int:
        """0 if its objectives count, 1 after a demotion, 2 if it asked for best effort: served in this order."""
        if self.tier != BEST_EFFORT:
            return 0
        return 1 if self.asked.tier != BEST_EFFORT else 2

    @property
    def comes_back(self) -> bool:
        """Whether it waits because its KV was dropped here. False if it is best effort."""
        return self.state is State.WAITING and self.drops > 0 and self.tier != BEST_EFFORT

    @property
    def finished_at(self) -> float | None:
        """Time of the last token."""
        return self.last_token_at

    @property
    def last_token_at(self) -> float | None:
        return self.token_times[-1] if self.token_times else None

    @property
    def deadline(self) -> float:
        """Deadline of the next token."""
        return deadline(self.slo, self.arrival, self.first_token_at, self.budget)

    @property
    def acceptance(self) -> float:
        """Expected share of its drafted tokens that are accepted."""
        return self.drafted.acceptance

    @property
    def drafts(self) -> bool:
        """Whether its next tokens may be drafted."""
        return self.params.drafts(self.generated)

    def token(self, position: int) -> int:
        """Return the token at a position that is known on the host."""
        if position < self.prompt_length:
            return self.prompt[position]
        return self.output[position - self.prompt_length]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens at positions [start, end), all known on the host."""
        n = self.prompt_length
        if end <= n:
            return tuple(self.prompt[start:end])
        if start >= n:
            return tuple(self.output[start - n : end - n])
        return (*self.prompt[start:n], *self.output[: end - n])

    def gain(self, token: int, at: float) -> str | None:
        """Add a sampled token. Returns the finish reason if it ends the request, otherwise None."""
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

    def count_first_token(self, at: float | None) -> None:
        """Let the first token count from another time, if it is the only one yet; None: leave it."""
        if at is not None and len(self.output) == 1:
            self.first_token_at = self.token_times[0] = at

    def resume(self, progress: Progress, now: float) -> None:
        """Continue after what another engine has done; call it before the request is submitted.

        The tokens count for limits, deadlines and stages as if they had been generated here. Raises
        InvalidValue if they end the request.
        """
        output, gap = progress.output, (progress.first - progress.last) / max(1, len(progress.output) - 1)
        self.scored = progress.scored
        for number, token in enumerate(output):
            self.pending += 1
            self.budget += self.tpot
            if self.gain(token, now - progress.first + number * gap) is not None:
                raise InvalidValue(f"token {number + 1} of the output so far, {token}, ends the request", "output")

    def switch_stage(self, stage: str) -> None:
        """Switch to another stage, from the next token on, including tokens still on the device."""
        before = self.tpot
        self.stage = stage
        self.tpot = self.slo.tpot_of(stage)
        self._regrant(self.pending + 1, before, self.tpot)

    def take_back(self, tokens: int) -> None:
        """Undo the last `tokens` pending tokens: the submitted steps will not sample them."""
        self._regrant(tokens, self.tpot, 0.0)
        self.pending -= tokens

    def _regrant(self, tokens: int, before: float, after: float) -> None:
        """Change the deadline budget of the last `tokens` tokens from `before` to `after` seconds each.

        The budget cannot be corrected by subtraction if a tpot is infinite, because inf - inf is
        nan.
        """
        if before < inf:
            self.budget += tokens * (after - before)
        elif tokens and self.generated <= tokens:
            self.budget = tokens * after if after > 0 else 0.0

    def wait_anew(self) -> None:
        """Reset to waiting, for a move to another instance without the KV. Tokens are kept."""
        self.state, self.decodes_in_place = State.WAITING, False
        self.computed = self.drops = 0
        self.slow = self.held = False

    def forget_cache(self) -> None:
        """Reset after the loss of the KV pool and the submitted steps. Tokens are kept."""
        self.pages, self.slot = [], None
        self.inflight = self.computed = self.sent_pages = self.drafting = 0
        self.slow = self.held = False
        self.suspended = False
        self.on_device = False
        self.take_back(self.pending)


def tightest(request: RequestView, tpot: float) -> float:
    """Return the least of the tpot of this stage, which has `tpot`, of the stages to come, and of the tbt."""
    slo = request.slo
    tpot = tpot if slo.tbt is None else min(tpot, slo.tbt)
    return min(tpot, slo.tpot_of(ANSWER)) if slo.stages else tpot
