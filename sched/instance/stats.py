"""Totals of one scheduler since its start, for metrics and reports. Writer: the Scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from ..api.perf import Load
from .session_pins import PinTotals
from .step_builder import BuiltStep

SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bucket bounds of tokens per step, as in vLLM
BLOCKING = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds until a step stopped
POSITIONS = 15  # draft positions with a counter of accepted tokens


class Sizes(list[int]):
    """A histogram of step sizes in tokens. The last bucket holds sizes above all bounds."""

    def __init__(self, counts: Iterable[int] = (0,) * (len(SIZES) + 1)) -> None:
        super().__init__(counts)

    def __add__(self, other: Iterable[int]) -> Sizes:  # type: ignore[override]
        return Sizes(map(sum, zip(self, other, strict=True)))


@dataclass(slots=True)
class Counters:
    """Cumulative counters of tokens, steps and seconds."""

    steps: int = 0
    prompt_tokens: int = 0  # prompt tokens computed
    generated_tokens: int = 0
    surplus_tokens: int = 0  # computed for requests that had already finished
    preemptions: int = 0  # requests that lost their KV under page pressure
    demotions: int = 0  # requests made best effort, on arrival or later
    suspended: int = 0  # steps suspended at a segment boundary
    resumed: int = 0
    asked: int = 0  # steps asked to stop that have stopped or ended since
    blocking: float = 0.0  # seconds between the two
    blocked: Sizes = field(default_factory=lambda: Sizes((0,) * (len(BLOCKING) + 1)))  # histogram over BLOCKING
    tokens: int = 0  # computed in steps: prefill, decode and draft tokens
    sizes: Sizes = field(default_factory=Sizes)
    drafts: int = 0  # drafts verified
    drafted: int = 0  # tokens
    accepted: int = 0  # drafted tokens that were accepted
    accepted_at: Sizes = field(default_factory=lambda: Sizes((0,) * POSITIONS))  # accepted, by position
    rebuilds: int = 0  # KV pools rebuilt after a step raised
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens found in the prefix cache
    pins_expired: int = 0  # sessions whose pin became too old
    pins_displaced: int = 0  # sessions whose pin made room for that of a more recent one
    pins_evicted: int = 0  # pages that running requests took although they were pinned
    predicted_seconds: float = 0.0  # of completed steps
    measured_seconds: float = 0.0

    def count(self, granted: BuiltStep) -> None:
        """Record the preemptions and the prefix-cache hits of a planned step."""
        self.preemptions += len(granted.dropped)
        for request in granted.admitted:
            if not request.drops and not request.output:
                self.prefix_queries += request.prompt_length
                self.prefix_hits += request.cached

    def step(self, load: Load, predicted: float, measured: float) -> None:
        """Record a completed step."""
        self.steps += 1
        self.tokens += load.tokens
        self.sizes[bisect_left(SIZES, load.tokens)] += 1
        self.prompt_tokens += load.prefill
        self.predicted_seconds += predicted
        self.measured_seconds += measured

    def unpinned(self, totals: PinTotals) -> None:
        """Record what ended pins of sessions."""
        self.pins_expired += totals.expired
        self.pins_displaced += totals.displaced
        self.pins_evicted += totals.evicted

    def stopped(self, seconds: float) -> None:
        """Record that a step stopped or ended `seconds` after it was asked to stop."""
        self.asked += 1
        self.blocking += seconds
        self.blocked[bisect_left(BLOCKING, seconds)] += 1

    def verified(self, drafted: int, right: int) -> None:
        """Record a verified draft."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += right
        for position in range(min(right, POSITIONS)):
            self.accepted_at[position] += 1

    @classmethod
    def total(cls, several: Iterable[Counters]) -> Counters:
        """Return the sum over instances."""
        result = cls()
        for one in several:
            for each in fields(cls):
                setattr(result, each.name, getattr(result, each.name) + getattr(one, each.name))
        return result


class Drift:
    """The recent ratio of measured to predicted step time. Writer: the Scheduler.

    The sums decay with a memory of about 50 steps. Ratios within 2 % count as 1, because the
    step-time model learns online and such differences are noise.
    """

    FADE, RIGHT = 0.98, 0.02

    def __init__(self, weight: float = 0.1) -> None:
        self._predicted = self._measured = weight  # seconds

    @property
    def ratio(self) -> float:
        """Measured divided by predicted seconds."""
        ratio = self._measured / self._predicted
        return ratio if abs(ratio - 1.0) > self.RIGHT else 1.0

    def count(self, predicted: float, measured: float) -> None:
        self._predicted = self.FADE * self._predicted + predicted
        self._measured = self.FADE * self._measured + measured
