"""SLO attainment, latency and goodput, with one implementation for simulated and served requests.

A request attains its SLO if it finished, its TTFT is at most ttft, its mean TPOT at most tpot
(always true for a single token) and, if set, its largest gap at most tbt. Rejected and unfinished
requests violate it. A count of requests alone rewards dropping the largest prompts, so attainment
is also given per class of prompt length and weighted by prompt tokens. Papers define TPOT
differently: FairBatching takes the worst mean from the first token on, SLOs-Serve the worst mean
over 10 tokens. Both are reported too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, nan
from typing import Any, NamedTuple, Protocol

import numpy as np

from .api.perf import Array
from .api.request import Request
from .api.slo import SLO

FINISHED = ("stop", "length")
WINDOW = 10  # tokens in the moving mean of SLOs-Serve
GOAL = 0.9  # attainment required for goodput
ROUNDING = 1e-9  # seconds: tolerance for sums of floats
CLASSES = (("<4K", 4096), ("4-16K", 16384), ("16-64K", 65536), (">=64K", inf))


class Finished(Protocol):
    """The inputs of a measurement. A Request provides them, and so does a client's record of one."""

    @property
    def id(self) -> int: ...
    @property
    def arrival(self) -> float: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def slo(self) -> SLO: ...
    @property
    def token_times(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str | None: ...


class Measured(NamedTuple):
    """The measurements of one request, in seconds.

    TTFT is inf without a first token. Values that need a second token are NaN without one.
    """

    id: int
    class_: str
    arrival: float
    prompt: int
    output: int
    ttft: float
    tpot: float  # mean time per token after the first
    worst_tpot: float  # FairBatching: max over k of (t_k - t_0) / k
    window_tpot: float  # worst mean over 10 consecutive tokens
    largest_gap: float  # TBT
    ended: float  # time of the last token, NaN without one
    reason: str | None
    ttft_attained: bool
    tpot_attained: bool  # includes the largest gap, if the SLO has a tbt
    worst_attained: bool = False  # the same with worst_tpot instead of the mean
    window_attained: bool = False  # the same with window_tpot
    promised: bool = True  # whether the request has any objective
    mean_attained: bool = True  # mean time per token only
    tbt_attained: bool = True  # largest gap only; true if the SLO has no tbt

    @property
    def attained(self) -> bool:
        """Whether the request attained its SLO."""
        return self.ttft_attained and self.tpot_attained


def measure(request: Finished, class_: str = "", allowance: float | None = None) -> Measured:
    """Measure one request.

    `allowance` is the total of seconds allowed for the tokens after the first, if their stages
    differ.
    """
    times = np.asarray(request.token_times, dtype=float)
    slo, count = request.slo, len(times)
    ttft = float(times[0]) - request.arrival if count else inf
    tpot = worst = window = gap = nan
    if count > 1:
        since = times[1:] - times[0]
        tpot = float(since[-1]) / (count - 1)
        worst = float((since / np.arange(1, count)).max())
        window = float((times[WINDOW:] - times[:-WINDOW]).max()) / WINDOW if count > WINDOW else tpot
        gap = float(np.diff(times).max())
    done = request.finish_reason in FINISHED
    allowed = slo.tpot * (count - 1) if allowance is None else allowance
    even = done and not (slo.tbt is not None and gap > slo.tbt + ROUNDING)
    smooth = count < 2 or float(times[-1] - times[0]) <= allowed + ROUNDING
    each = (allowed + ROUNDING) / (count - 1) if count > 1 else inf  # NaN compares false: a single token is never late
    return Measured(
        request.id,
        class_,
        request.arrival,
        request.prompt_length,
        count,
        ttft,
        tpot,
        worst,
        window,
        gap,
        float(times[-1]) if count else nan,
        request.finish_reason,
        done and ttft <= slo.ttft + ROUNDING,
        even and smooth,
        even and not worst > each,
        even and not window > each,
        min(slo.ttft, slo.tpot) < inf or slo.tbt is not None,
        done and smooth,
        even or slo.tbt is None,
    )


def stage_allowance(request: Request) -> float | None:
    """Return the seconds allowed for the tokens after the first, by their stages; None without stages."""
    if not request.slo.stages:
        return None
    return request.budget - (request.pending + 1) * request.slo.tpot_of(request.stage)


class Spread(NamedTuple):
    """Statistics of a distribution; NaN if it is empty."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread(values: Sequence[float] | Array) -> Spread:
    """Return the statistics of the finite values."""
    array = np.asarray(values, dtype=float)
    array = array[np.isfinite(array)]
    if not len(array):
        return Spread(nan, nan, nan, nan, nan, nan)
    p50, p90, p95, p99 = np.percentile(array, (50, 90, 95, 99)).tolist()
    return Spread(float(array.mean()), p50, p90, p95, p99, float(array.max()))


class Share(NamedTuple):
    """A number of requests, and the share that attained their SLO."""

    requests: int
    attained: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The measurements of many requests: shares from 0 to 1, times in seconds, rates per second of `duration`.

    Requests without objectives (best effort) count only in the share of their class, unless there
    are no others.
    """

    count: int
    attained: float
    ttft_attained: float
    tpot_attained: float
    worst_attained: float  # TTFT, and TPOT as the worst mean from the first token on (FairBatching)
    window_attained: float  # TTFT, and TPOT as the worst mean over 10 tokens (SLOs-Serve)
    token_weighted: float  # attained, weighted by prompt tokens
    by_length: Mapping[str, Share]
    by_class: Mapping[str, Share]
    ttft: Spread
    tpot: Spread
    worst_tpot: Spread
    window_tpot: Spread
    largest_gap: Spread
    latency: Spread  # arrival to last token
    duration: float  # first arrival to last token
    output_throughput: float  # tokens per second, over all requests
    request_throughput: float  # finished requests per second
    request_goodput: float  # attained requests per second
    median_speed: float  # median of the tokens per second after the first token
    reasons: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: mappings for named tuples, None for numbers that are not finite."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def summarize(measured: Sequence[Measured], skip: int = 0) -> Summary:
    """Summarize requests.

    Leaves out the first and last `skip` requests by arrival, so that the steady state remains.
    """
    ordered = sorted(measured, key=lambda request: (request.arrival, request.id))
    ordered = ordered[skip : len(ordered) - skip]
    promised = [request for request in ordered if request.promised] or ordered
    attained = np.array([request.attained for request in promised], dtype=bool)
    prompts = np.array([request.prompt for request in promised], dtype=float)
    tpot = np.array([request.tpot for request in ordered], dtype=float)
    ends = [request.ended for request in ordered if isfinite(request.ended)]
    duration = max(ends) - ordered[0].arrival if ends else 0.0
    finished = sum(request.reason in FINISHED for request in ordered)
    every = np.array([request.attained for request in ordered], dtype=bool)

    def per_second(amount: float) -> float:
        return float(amount) / duration if duration > 0 else nan

    return Summary(
        count=len(ordered),
        attained=_mean(attained),
        ttft_attained=_mean(request.ttft_attained for request in promised),
        tpot_attained=_mean(request.tpot_attained for request in promised),
        worst_attained=_mean(request.ttft_attained and request.worst_attained for request in promised),
        window_attained=_mean(request.ttft_attained and request.window_attained for request in promised),
        token_weighted=float(prompts @ attained / prompts.sum()) if prompts.sum() else nan,
        by_length=_shares(
            [length_class(request.prompt) for request in promised], attained, [name for name, _ in CLASSES]
        ),
        by_class=_shares(
            [request.class_ for request in ordered], every, sorted({request.class_ for request in ordered} - {""})
        ),
        ttft=spread([request.ttft for request in ordered]),
        tpot=spread(tpot),
        worst_tpot=spread([request.worst_tpot for request in ordered]),
        window_tpot=spread([request.window_tpot for request in ordered]),
        largest_gap=spread([request.largest_gap for request in ordered]),
        latency=spread([request.ended - request.arrival for request in ordered]),
        duration=duration,
        output_throughput=per_second(sum(request.output for request in ordered)),
        request_throughput=per_second(finished),
        request_goodput=per_second(attained.sum()),
        median_speed=float(np.median(1 / tpot[tpot > 0])) if np.any(tpot > 0) else nan,
        reasons=dict(sorted(Counter(request.reason or "unfinished" for request in ordered).items())),
    )


def length_class(prompt: int) -> str:
    """Return the class of prompt length of a prompt with this many tokens."""
    return next(name for name, end in CLASSES if prompt < end)


def goodput_rate(rates: Sequence[float], attained: Sequence[float], goal: float = GOAL) -> float | None:
    """Return the highest rate at which attainment is at least `goal`, there and at every lower one, or None.

    Attainment may rise again above a rate that missed the goal; a server cannot be held at that rate, so such rates
    do not count.
    """
    highest = None
    for rate, share in sorted(zip(rates, attained, strict=True)):
        if not share >= goal:
            break
        highest = rate
    return highest


def _mean(flags: Iterable[bool]) -> float:
    array = np.fromiter(flags, dtype=bool)
    return float(array.mean()) if len(array) else nan


def _shares(
    names: Sequence[str], attained: np.ndarray[Any, np.dtype[np.bool_]], wanted: Sequence[str]
) -> dict[str, Share]:
    array = np.array(names)
    chosen = {name: attained[array == name] for name in wanted}
    return {name: Share(len(flags), _mean(flags)) for name, flags in chosen.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value
