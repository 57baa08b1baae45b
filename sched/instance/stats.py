"""Totals of one scheduler since its start, for metrics and reports. Writer: the Scheduler."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..api.metric import COUNTER, HISTOGRAM, counter, row, summary
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

    steps: int = counter("steps", "Steps of all instances.")
    prompt_tokens: int = counter("computed_prompt_tokens", "Prompt tokens computed, including again after preemptions.")
    generated_tokens: int = 0
    left_out: int = counter(
        "decodes_left_out", "Running decodes without a token in a step of their instance, over all steps."
    )
    held: int = counter(
        "slow_masks", "Tokens whose mask of structured outputs took long, so that it was made between two steps."
    )
    surplus_tokens: int = counter("surplus_tokens", "Tokens computed for requests that had already ended.")
    preemptions: int = counter("num_preemptions", "Preemptions, each of which dropped the KV of a request.")
    demotions: int = counter("demotions", "Requests demoted to best effort, on arrival or later.")
    suspended: int = counter("preempted_steps", "Prefill steps stopped at a segment boundary for more urgent work.")
    resumed: int = counter("resumed_steps", "Stopped prefill steps that were resumed.")
    asked: int = 0  # steps asked to stop that have stopped or ended since
    blocking: float = 0.0  # seconds between the two
    blocked: Sizes = row(
        HISTOGRAM,
        "preemption_blocking_seconds",
        "Time from requesting that a prefill step stops until it has stopped or completed.",
        {"edges": BLOCKING, "of": "blocking"},
        default_factory=lambda: Sizes((0,) * (len(BLOCKING) + 1)),
    )
    tokens: int = 0  # computed in steps: prefill, decode and draft tokens
    sizes: Sizes = row(
        HISTOGRAM, "iteration_tokens_total", "Tokens per step.", {"edges": SIZES, "of": "tokens"}, default_factory=Sizes
    )
    drafts: int = counter("spec_decode_num_drafts", "Drafts verified.")
    drafted: int = counter("spec_decode_num_draft_tokens", "Draft tokens proposed.")
    accepted: int = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
    accepted_at: Sizes = row(
        COUNTER,
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft.",
        {"label": "position"},
        default_factory=lambda: Sizes((0,) * POSITIONS),
    )
    rebuilds: int = counter("pool_rebuilds", "KV pools rebuilt after a failed step.")
    prefix_queries: int = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    prefix_hits: int = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
    pins_expired: int = counter("session_pins_expired", "Sessions whose pages were kept for --session-timeout.")
    pins_displaced: int = counter(
        "session_pins_displaced", "Sessions whose pages gave way to those of more recent ones."
    )
    pins_evicted: int = counter("session_pinned_pages_evicted", "Pages of sessions that running requests needed.")
    predicted_seconds: float = summary("predicted_step_seconds", "Predicted step times.", of="steps")
    measured_seconds: float = summary("measured_step_seconds", "Measured step times.", of="steps")

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

    def left(self, granted: BuiltStep, running: int) -> None:
        """Record the running decodes, of which there were `running`, without a token in a planned step."""
        load = granted.load
        rows = load.decode - (sum(span.draft for span in granted.spans) if load.drafts else 0)
        self.left_out += max(0, running - rows - sum(request.generated > 0 for request in granted.dropped))

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
        for counters in several:
            for each in fields(cls):
                setattr(result, each.name, getattr(result, each.name) + getattr(counters, each.name))
        return result


class HostGap:
    """The seconds that the device waits for the host before a step, if requests may draft. Writer: the Scheduler.

    A step after a draft cannot be planned ahead, so this wait is part of the cost of the step.
    """

    MOST = 0.25  # seconds that are counted

    def __init__(self, drafts: bool) -> None:
        self._drafts = drafts
        self._ended = 0.0  # the last step, executor's clock
        self._waits = False  # there was work at that time

    def before(self, started: float, finished: float, waits: bool) -> float:
        """Return the wait before a step that has finished. waits: whether there is work behind it."""
        gap, counts = started - self._ended, self._drafts and self._waits
        self._ended, self._waits = finished, waits
        return min(max(gap, 0.0), self.MOST) if counts else 0.0


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
