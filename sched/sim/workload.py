"""Requests to simulate: when they arrive, how long they are, what they were promised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log, sqrt
from typing import Literal, overload

import numpy as np

from ..errors import InvalidValue
from ..perf.model import Array
from ..slo import SLO

MAX_PROMPT = 1 << 24  # tokens; prompts of different requests are this far apart in token ids
DEFAULT_SLO = SLO()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. Times in seconds since the start of the workload, lengths in tokens.

    hash_ids: names of the prompt's leading blocks of `block` tokens, in order; equal names are equal tokens.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO = DEFAULT_SLO
    class_: str = ""
    key: str = ""
    hash_ids: tuple[int, ...] = ()
    block: float = 512.0

    def prompt(self, id: int) -> Sequence[int]:
        """Token ids of the prompt, made when looked at. Without `hash_ids` no two requests share a token."""
        if self.hash_ids:
            return BlockTokens(self.prompt_tokens, self.hash_ids, self.block, id)
        return range(id * MAX_PROMPT, id * MAX_PROMPT + self.prompt_tokens)


class BlockTokens(Sequence[int]):
    """Prompt tokens that follow from the names of their blocks. Equal blocks at equal places are equal tokens.

    Tokens past the last named block are this request's own.
    """

    __slots__ = ("_block", "_hash_ids", "_id", "_length")

    def __init__(self, length: int, hash_ids: Sequence[int], block: float, id: int) -> None:
        self._length = length
        self._hash_ids = hash_ids
        self._block = block
        self._id = id

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return tuple(self[i] for i in range(start, stop, step))
            return tuple(token for piece in self._pieces(start, stop) for token in piece)
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of a prompt of {self._length}")
        index %= self._length
        return next(self._pieces(index, index + 1))[0]

    def _pieces(self, start: int, stop: int) -> Iterator[range]:
        """Tokens of [start, stop), block by block."""
        while start < stop:
            number = int(start / self._block)
            if ceil((number + 1) * self._block) <= start:  # rounding
                number += 1
            first, end = ceil(number * self._block), min(ceil((number + 1) * self._block), stop)
            name = self._hash_ids[number] if number < len(self._hash_ids) else -1 - self._id
            base = name * MAX_PROMPT + start - (first if name >= 0 else 0)
            yield range(base, base + end - start)
            start = end


Kind = Literal["lognormal", "loguniform", "uniform", "fixed"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, clipped to [low, high].

    lognormal: `median` and `sigma`, or `mean` and `std` (before clipping). loguniform, uniform: between low and
    high. fixed: `value`.
    """

    kind: Kind
    low: int = 1
    high: int = MAX_PROMPT - 1
    median: float | None = None
    sigma: float | None = None
    mean: float | None = None
    std: float | None = None
    value: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high < MAX_PROMPT:
            raise InvalidValue(f"lengths low={self.low} and high={self.high} must be in order and at least 1", "low")
        given = {name for name in ("median", "sigma", "mean", "std", "value") if getattr(self, name) is not None}
        allowed = {"lognormal": ({"median", "sigma"}, {"mean", "std"}), "fixed": ({"value"},)}.get(self.kind, (set(),))
        if given not in allowed:
            wanted = " or ".join(" and ".join(sorted(names)) for names in allowed) or "neither of these"
            raise InvalidValue(f"lengths of kind {self.kind!r} take {wanted}, not {sorted(given)}", "kind")
        if any(getattr(self, name) <= 0 for name in given):
            raise InvalidValue(f"lengths {sorted(given)} must all be positive", "kind")

    def draw(self, random: np.random.Generator, count: int) -> Array:
        """`count` lengths, whole numbers."""
        if self.kind == "fixed":
            drawn = np.full(count, float(self.value or 0))
        elif self.kind == "uniform":
            drawn = random.integers(self.low, self.high, count, endpoint=True).astype(float)
        elif self.kind == "loguniform":
            drawn = np.exp(random.uniform(log(self.low), log(self.high), count))
        else:
            drawn = np.exp(random.normal(*self._normal(), count))
        clipped: Array = np.clip(np.rint(drawn), self.low, self.high)
        return clipped

    def _normal(self) -> tuple[float, float]:
        """Mean and standard deviation of the logarithm."""
        if self.median is not None and self.sigma is not None:
            return log(self.median), self.sigma
        assert self.mean is not None and self.std is not None
        variance = log(1 + (self.std / self.mean) ** 2)
        return log(self.mean) - variance / 2, sqrt(variance)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests come, at a mean rate that is given elsewhere.

    poisson. gamma: gaps with coefficient of variation `cv` (burstiness of vLLM's benchmark is 1/cv²). on_off:
    Poisson during `on` seconds at `contrast` times the rate of the following `off` seconds, again and again.
    """

    kind: Literal["poisson", "gamma", "on_off", "even"] = "poisson"
    cv: float = 1.0
    on: float = 10.0
    off: float = 30.0
    contrast: float = 10.0

    def __post_init__(self) -> None:
        for name in ("cv", "on", "off", "contrast"):
            if not 0 < getattr(self, name) < inf:
                raise InvalidValue(f"arrivals {name}={getattr(self, name)!r} must be positive", name)

    def draw(self, random: np.random.Generator, count: int, rate: float) -> Array:
        """`count` times in seconds, ascending."""
        if not 0 < rate < inf:
            raise InvalidValue(f"rate={rate!r} must be a positive number of requests per second", "qps")
        if self.kind == "even":
            times: Array = np.arange(count) / rate
        elif self.kind == "gamma":
            shape = 1 / self.cv**2
            times = np.cumsum(random.gamma(shape, 1 / (rate * shape), count))
        else:
            times = np.cumsum(random.exponential(1 / rate, count))
        return self._burst(times) if self.kind == "on_off" else times

    def _burst(self, times: Array) -> Array:
        """Poisson times at the mean rate -> times at which the on-off rate has accumulated as much."""
        period, share = self.on + self.off, self.on * self.contrast / (self.on * self.contrast + self.off)
        cycle, rest = np.floor(times / period), np.mod(times, period) / period
        inside = np.where(rest < share, rest / share * self.on, self.on + (rest - share) / (1 - share) * self.off)
        warped: Array = cycle * period + inside
        return warped


@dataclass(frozen=True, slots=True)
class Tail:
    """A share of the prompts that comes from another distribution."""

    share: float
    lengths: Lengths

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidValue(f"tail share={self.share!r} must be between 0 and 1", "share")


@dataclass(frozen=True, slots=True)
class Workload:
    """A distribution of requests."""

    name: str
    prompt: Lengths
    output: Lengths
    tail: Tail | None = None
    arrivals: Arrivals = Arrivals()
    ttft: float = 8.0
    tpot: float = 0.05
    tbt: float | None = None
    request_class: str = ""

    def draw(self, count: int, rate: float, seed: int) -> list[Arrival]:
        """`count` requests at `rate` per second. Lengths depend on the seed alone: every rate serves the same ones."""
        if count < 1:
            raise InvalidValue(f"num_requests={count} must be at least 1", "num_requests")
        lengths, times = (np.random.default_rng((seed, stream)) for stream in (0, 1))
        prompts = self.prompt.draw(lengths, count)
        outputs = self.output.draw(lengths, count)
        if self.tail is not None:
            long = lengths.random(count) < self.tail.share
            prompts = np.where(long, self.tail.lengths.draw(lengths, count), prompts)
        slo = SLO(ttft=self.ttft, tpot=self.tpot, tbt=self.tbt)
        return [
            Arrival(time, int(prompt), int(output), slo, self.request_class)
            for time, prompt, output in zip(
                self.arrivals.draw(times, count, rate).tolist(), prompts.tolist(), outputs.tolist(), strict=True
            )
        ]


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
NAMED = {workload.name: workload for workload in (K128, K100, K32)}


def scale(arrivals: Sequence[Arrival], *, time: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> list[Arrival]:
    """Arrival times multiplied by `time`, lengths divided by `prompt` and `output` (at least 1 token is left)."""
    for name, value in (("time_scale", time), ("prompt_scale", prompt), ("output_scale", output)):
        if not 0 < value < inf:
            raise InvalidValue(f"{name}={value!r} must be positive", name)
    return [
        replace(
            arrival,
            time=arrival.time * time,
            prompt_tokens=max(1, ceil(arrival.prompt_tokens / prompt)),
            output_tokens=max(1, ceil(arrival.output_tokens / output)),
            block=arrival.block / prompt,
        )
        for arrival in arrivals
    ]
