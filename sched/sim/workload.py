"""Distributions of requests: arrival times, lengths and SLOs.

The published workloads are in scenarios.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import overload

import numpy as np

from ..api.errors import InvalidValue
from ..api.new_request import STANDARD
from ..api.request import BEST_EFFORT
from ..api.slo import SLO, THINKING
from .arrival import DEFAULT_SLO, Arrival, BlockTokens, best_effort, scale, scale_slo, validate
from .draws import MAX_PROMPT, Arrivals, Lengths, Tail

__all__ = [
    "DEFAULT_SLO",
    "K32",
    "K100",
    "K128",
    "MAX_PROMPT",
    "POISSON",
    "Arrival",
    "Arrivals",
    "BlockTokens",
    "Lengths",
    "Mix",
    "Rounds",
    "Share",
    "Slowdown",
    "Tail",
    "Workload",
    "best_effort",
    "for_server",
    "scale",
    "scale_slo",
    "validate",
]

POISSON = Arrivals()
CHAIN = 1 << 32  # first hash of prefixes shared by rounds; larger than any hash in a trace


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A TTFT of `times` what a prompt takes on an idle instance, which is `fixed + per_token · tokens` seconds."""

    times: float
    fixed: float
    per_token: float

    def __post_init__(self) -> None:
        for name in ("times", "fixed", "per_token"):
            if not 0 < getattr(self, name) < inf:
                raise InvalidValue(f"slowdown {name}={getattr(self, name)!r} must be positive", name)

    def ttft(self, tokens: int) -> float:
        """Return the TTFT in seconds of a prompt with `tokens` uncached tokens."""
        return self.times * (self.fixed + self.per_token * tokens)

    def measured(self, alone: Callable[[int], float], short: int = 256, long: int = 2048) -> Slowdown:
        """Fit the slowdown to other devices, on which a prompt alone takes `alone(tokens)` seconds."""
        slope = (alone(long) - alone(short)) / (long - short)
        fixed = alone(short) - slope * short
        if fixed <= 0:  # attention dominates even short prompts: use a line through almost 0
            fixed, slope = 1e-6, (alone(long) - 1e-6) / long
        return replace(self, fixed=fixed, per_token=slope)


@dataclass(frozen=True, slots=True)
class Rounds:
    """A request of several prefills and decodes, such as that of a model that calls tools.

    The number of rounds is normal with `mean` and `std`, rounded, and at least 1.

    delay: mean seconds that a tool takes, exponentially distributed.
    tpot: of all rounds but the last one, which is the answer and has the TPOT of the workload.
    opening: tokens before the first prompt, such as a system prompt and documents.
    """

    mean: float
    std: float
    delay: float
    tpot: float | None = None
    opening: Lengths | None = None

    def __post_init__(self) -> None:
        for name, low in (("mean", 1.0), ("std", 0.0), ("delay", 0.0)):
            if not low <= getattr(self, name) < inf:
                raise InvalidValue(f"rounds {name}={getattr(self, name)!r} must be at least {low:g}", name)


Chain = tuple[Arrival, ...]  # the rounds of one request


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of requests of one kind.

    tail, output_tail: replace a share of the prompts or outputs.
    ttft, tpot, tbt: in seconds. A TTFT may be a slowdown.
    thinking: lengths of a stage before the answer, which is `output`. thinking_tpot: TPOT of that stage.
    request_class: name of these requests in reports. tier: as for Request. weight: see SLO.
    """

    name: str
    prompt: Lengths
    output: Lengths
    tail: Tail | None = None
    arrivals: Arrivals = POISSON
    ttft: float | Slowdown = 8.0
    tpot: float = 0.05
    tbt: float | None = None
    request_class: str = ""
    output_tail: Tail | None = None
    thinking: Lengths | None = None
    thinking_tpot: float | None = None
    rounds: Rounds | None = None
    tier: str = STANDARD
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.tier not in (STANDARD, BEST_EFFORT):
            raise InvalidValue(f"tier={self.tier!r} must be {STANDARD!r} or {BEST_EFFORT!r}", "tier")
        self._slo(1, last=True)  # raises if an SLO is not positive

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        """Draw `count` requests at `rate` per second. Lengths depend only on the seed, not on the rate.

        With rounds, `count` and `rate` refer to whole requests, and the list is longer.
        """
        _check(count)
        lengths, times = (np.random.default_rng((seed, stream)) for stream in (0, 1))
        return _in_order(zip(self.arrivals.draw(times, count, rate).tolist(), self.chains(lengths, count), strict=True))

    def chains(self, random: np.random.Generator, count: int) -> list[Chain]:
        """Draw the rounds of `count` requests, without their times."""
        lasting = [1] * count
        if self.rounds is not None:
            drawn = random.normal(self.rounds.mean, self.rounds.std, count)
            lasting = np.rint(drawn).clip(min=1).astype(int).tolist()
        total = sum(lasting)
        prompts, outputs = self.prompt.draw(random, total), self.output.draw(random, total)
        if self.tail is not None:
            prompts = self.tail.replace(random, prompts)
        if self.output_tail is not None:
            outputs = self.output_tail.replace(random, outputs)
        thoughts = np.zeros(total) if self.thinking is None else self.thinking.draw(random, total)
        delays = np.zeros(total) if self.rounds is None else random.exponential(self.rounds.delay, total)
        if self.rounds is not None and self.rounds.opening is not None:
            firsts = np.cumsum(lasting) - lasting
            prompts[firsts] += self.rounds.opening.draw(random, count)
        drawn_rounds = zip(
            prompts.astype(int).tolist(),
            outputs.astype(int).tolist(),
            thoughts.astype(int).tolist(),
            delays.tolist(),
            strict=True,
        )
        return [self._chain([next(drawn_rounds) for _ in range(rounds)]) for rounds in lasting]

    def _chain(self, rounds: list[tuple[int, int, int, float]]) -> Chain:
        chain: list[Arrival] = []
        said = 0
        for number, (prompt, answer, thought, delay) in enumerate(rounds):
            slo = self._slo(prompt, last=number == len(rounds) - 1)
            chain.append(
                Arrival(
                    0.0,
                    said + prompt,
                    thought + answer,
                    slo,
                    self.request_class,
                    tier=self.tier,
                    thinking_tokens=thought,
                    delay=delay if number else 0.0,
                )
            )
            said += prompt + thought + answer
        return tuple(chain)

    def _slo(self, prompt: int, *, last: bool) -> SLO:
        ttft = self.ttft.ttft(prompt) if isinstance(self.ttft, Slowdown) else self.ttft
        early = None if self.rounds is None or last else self.rounds.tpot
        stages = () if self.thinking_tpot is None else ((THINKING, self.thinking_tpot),)
        return SLO(ttft, self.tpot if early is None else early, self.tbt, stages, self.weight)


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one kind of requests in a mix: any positive number, relative to the other shares."""

    share: float
    workload: Workload

    def __post_init__(self) -> None:
        if not 0 < self.share < inf:
            raise InvalidValue(f"share={self.share!r} of {self.workload.name} must be positive", "share")


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix of several kinds of requests.

    arrivals: common arrival times of all kinds. None: each kind has its own, at its share of the rate.
    ttft, tpot: override the SLO of every kind that is not best effort.
    """

    name: str
    parts: tuple[Share, ...]
    arrivals: Arrivals | None = None
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise InvalidValue(f"mixture {self.name} must have at least one part", "parts")

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        """Draw `count` requests at `rate` per second, as Workload.draw. Equal seeds give equal kinds and lengths."""
        _check(count)
        total = sum(part.share for part in self.parts)
        shares = [part.share / total for part in self.parts]
        timed: list[tuple[float, Chain]] = []
        if self.arrivals is None:
            for index, share in enumerate(shares):
                enough = ceil(count * share + 6 * (count * share) ** 0.5) + 6  # the list is cut to `count` below
                times = self.parts[index].workload.arrivals.draw(_stream(seed, 1, index), enough, share * rate)
                timed += zip(times.tolist(), self._kind(index, seed, enough), strict=True)
            timed.sort(key=lambda pair: pair[0])
            return _in_order(timed[:count])
        kinds = np.random.default_rng((seed, 2)).choice(len(shares), count, p=shares)
        chains = [iter(self._kind(index, seed, int(np.sum(kinds == index)))) for index in range(len(shares))]
        when = self.arrivals.draw(np.random.default_rng((seed, 1)), count, rate)
        return _in_order((time, next(chains[kind])) for time, kind in zip(when.tolist(), kinds.tolist(), strict=True))

    def _kind(self, index: int, seed: int, count: int) -> list[Chain]:
        workload = self.parts[index].workload
        if workload.tier != BEST_EFFORT:
            ttft = workload.ttft if self.ttft is None else self.ttft
            workload = replace(workload, ttft=ttft, tpot=workload.tpot if self.tpot is None else self.tpot)
        return workload.chains(_stream(seed, 0, index), count)


@overload
def for_server(source: Workload, alone: Callable[[int], float]) -> Workload: ...
@overload
def for_server(source: Mix, alone: Callable[[int], float]) -> Mix: ...
def for_server(source: Workload | Mix, alone: Callable[[int], float]) -> Workload | Mix:
    """Fit every slowdown of a workload to a server that takes `alone(tokens)` seconds for a prompt by itself.

    SLOs in seconds do not change.
    """
    if isinstance(source, Mix):
        return replace(
            source, parts=tuple(replace(part, workload=for_server(part.workload, alone)) for part in source.parts)
        )
    return replace(source, ttft=source.ttft.measured(alone)) if isinstance(source.ttft, Slowdown) else source


def _stream(seed: int, purpose: int, part: int) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, part))


def _check(count: int) -> None:
    if count < 1:
        raise InvalidValue(f"num_requests={count} must be at least 1", "num_requests")


def _in_order(timed: Iterable[tuple[float, Chain]]) -> list[Arrival]:
    """Merge requests in order of time into one list, each followed by its further rounds."""
    arrivals: list[Arrival] = []
    for number, (time, chain) in enumerate(timed):
        names = (CHAIN + number,) if len(chain) > 1 else ()
        for round, arrival in enumerate(chain):
            after = len(arrivals) - 1 if round else None
            block = float(MAX_PROMPT) if names else arrival.block
            arrivals.append(replace(arrival, time=time, hash_ids=names, block=block, after=after))
    return arrivals


K = 1024


def _long_tail(name: str, share: float, low: int, high: int) -> Workload:
    return Workload(
        name,
        prompt=Lengths("lognormal", median=2500, sigma=1.0, low=64, high=32 * K),
        output=Lengths("lognormal", mean=400, std=360, low=8, high=4096),
        tail=Tail(share, Lengths("loguniform", low=low, high=high)),
    )


K128 = _long_tail("K128", 0.02, 64 * K, 128 * K)
K100 = _long_tail("K100", 0.03, 32 * K, 100 * K)
K32 = _long_tail("K32", 0.03, 16 * K, 32 * K)
