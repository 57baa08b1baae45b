"""SLO attainment and slack by request class: totals read by a metrics scrape.

Updated once per finished request, never per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf, isfinite

from jaxserve.sched.api.metric import COUNTER, HISTOGRAM, counter, row
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.metrics import CLASSES, FINISHED, Measured, length_class, measure, stage_allowance

PHASES = ("ttft", "tpot", "tbt", "all")  # all: every objective of the request

# Upper edges of histograms.
SLACK = (-60, -30, -10, -5, -2, -1, -.5, -.2, -.1, -.05, 0, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60)  # fmt: skip
ERRORS = (.01, .02, .05, .1, .15, .2, .3, .5, .75, 1, 2, 5, 10)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """A snapshot of a histogram: counts per bucket, the last one above all edges."""

    sizes: tuple[int, ...]
    total: float  # sum of all values

    @property
    def count(self) -> int:
        return sum(self.sizes)


class Histogram:
    """A histogram over fixed edges. Writer: one thread."""

    __slots__ = ("_edges", "_sizes", "_total")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges, self._sizes, self._total = edges, [0] * (len(edges) + 1), 0.0

    def add(self, value: float) -> None:
        self._sizes[bisect_left(self._edges, value)] += 1
        self._total += value

    def spread(self) -> Spread:
        return Spread(tuple(self._sizes), self._total)


@dataclass(frozen=True, slots=True)
class ClassStats:
    """A snapshot of one class. Mappings are by phase."""

    ended: Mapping[str, int] = row(
        COUNTER,
        "slo_requests",
        "Ended requests by objective; all: those with any, and every objective that the request has.",
        {"label": "phase"},
    )
    attained: Mapping[str, int] = row(
        COUNTER, "slo_attained", "Ended requests that attained the objective.", {"label": "phase"}
    )
    slack: Mapping[str, Spread] = row(
        HISTOGRAM,
        "request_slack_seconds",
        "Slack left at the first token (ttft), at the last (tpot) and after the longest gap (tbt).",
        {"label": "phase", "edges": SLACK},
    )
    errors: Spread = row(
        HISTOGRAM,
        "ttft_prediction_error",
        "|predicted - measured| / measured TTFT, as predicted when the prompt was routed.",
        {"edges": ERRORS},
    )


@dataclass(frozen=True, slots=True)
class PromptStats:
    """A snapshot of the requests with prompts of one size, over all classes but best effort."""

    ended: int = counter("slo_requests_by_prompt", "Ended requests with objectives, by size of the prompt in tokens.")
    attained: int = counter("slo_attained_by_prompt", "Those that attained all of their objectives.")


NO_PROMPTS = {name: PromptStats() for name, _ in CLASSES}


def _none() -> dict[str, int]:
    return dict.fromkeys(PHASES, 0)


@dataclass(slots=True)
class _Tally:
    ended: dict[str, int] = field(default_factory=_none)
    attained: dict[str, int] = field(default_factory=_none)
    slack: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram(SLACK) for phase in PHASES[:3]})
    errors: Histogram = field(default_factory=lambda: Histogram(ERRORS))

    def count(self, phase: str, kept: bool) -> None:
        self.ended[phase] += 1
        self.attained[phase] += kept


class Tallies:
    """Totals by class, for a fixed set of classes. Writer: the engine's thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tallies = {name: _Tally() for name in names}
        self._by_prompt = dict(NO_PROMPTS)

    def add(self, request: Request, error: float | None) -> None:
        """Count a request that ended other than by cancellation. error: of its predicted TTFT, if any."""
        tally, slo = self._tallies[request.class_], request.slo
        staged = stage_allowance(request)
        measured = measure(request, allowance=staged)
        if slo.ttft < inf:
            tally.count("ttft", measured.ttft_attained)
        if min(chain([slo.tpot], (tpot for _, tpot in slo.stages))) < inf:
            tally.count("tpot", measured.mean_attained)
        if slo.tbt is not None:
            tally.count("tbt", measured.tbt_attained)
        if measured.promised:
            tally.count("all", measured.attained)
            if request.class_ != BEST_EFFORT:
                size = length_class(measured.prompt)
                before = self._by_prompt[size]
                self._by_prompt[size] = PromptStats(before.ended + 1, before.attained + measured.attained)
        if measured.reason in FINISHED:
            allowed = slo.tpot * (measured.output - 1) if staged is None else staged
            for phase, seconds in _slack(request, measured, allowed).items():
                if isfinite(seconds):
                    tally.slack[phase].add(seconds)
        if error is not None:
            tally.errors.add(error)

    def stats(self) -> dict[str, ClassStats]:
        """Return a snapshot; may be called from any thread."""
        return {
            name: ClassStats(
                dict(tally.ended),
                dict(tally.attained),
                {phase: histogram.spread() for phase, histogram in tally.slack.items()},
                tally.errors.spread(),
            )
            for name, tally in self._tallies.items()
        }

    def by_prompt(self) -> dict[str, PromptStats]:
        """Return the totals by size of the prompt; may be called from any thread."""
        return dict(self._by_prompt)


def _slack(request: Request, measured: Measured, allowed: float) -> dict[str, float]:
    """Return the seconds left of each objective; inf or NaN without one.

    allowed: seconds for all tokens after the first.
    """
    tbt = inf if request.slo.tbt is None else request.slo.tbt
    return {
        "ttft": request.slo.ttft - measured.ttft,
        "tpot": allowed - measured.tpot * (measured.output - 1),
        "tbt": tbt - measured.largest_gap,
    }
