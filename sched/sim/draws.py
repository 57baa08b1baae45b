"""Random draws for workloads: lengths in tokens and arrival times."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Literal

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array

MAX_PROMPT = 1 << 24  # tokens; also the distance between the token ids of different requests

Kind = Literal["lognormal", "gamma", "beta", "loguniform", "uniform", "fixed"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, clipped to [low, high].

    lognormal: `median` and `sigma`, or `mean` and `std` (before clipping). gamma: `mean` and `std` (before
    clipping). beta: `mean` and `std` between low and high, for sources with a 99th percentile closer to
    the mean than that of a normal distribution. loguniform, uniform: between low and high. fixed: `value`.
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
        moments = {"mean", "std"}
        allowed = {
            "lognormal": ({"median", "sigma"}, moments),
            "gamma": (moments,),
            "beta": (moments,),
            "fixed": ({"value"},),
        }.get(self.kind, (set(),))
        if given not in allowed:
            wanted = " or ".join(" and ".join(sorted(names)) for names in allowed) or "neither of these"
            raise InvalidValue(f"lengths of kind {self.kind!r} take {wanted}, not {sorted(given)}", "kind")
        if any(getattr(self, name) <= 0 for name in given):
            raise InvalidValue(f"lengths {sorted(given)} must all be positive", "kind")
        if self.kind == "beta" and not self._concentration() > 0:
            raise InvalidValue(
                f"lengths of kind 'beta' with mean={self.mean} and std={self.std} do not fit between {self.low} and "
                f"{self.high}",
                "high",
            )

    def draw(self, random: np.random.Generator, count: int) -> Array:
        """Draw `count` lengths, which are whole numbers."""
        if self.kind == "fixed":
            drawn = np.full(count, float(self.value or 0))
        elif self.kind == "uniform":
            drawn = random.integers(self.low, self.high, count, endpoint=True).astype(float)
        elif self.kind == "loguniform":
            drawn = np.exp(random.uniform(log(self.low), log(self.high), count))
        elif self.kind == "gamma":
            mean, std = self._moments()
            drawn = random.gamma((mean / std) ** 2, std**2 / mean, count)
        elif self.kind == "beta":
            middle, total = self._middle(), self._concentration()
            drawn = self.low + (self.high - self.low) * random.beta(middle * total, (1 - middle) * total, count)
        else:
            drawn = np.exp(random.normal(*self._normal(), count))
        clipped: Array = np.clip(np.rint(drawn), self.low, self.high)
        return clipped

    def _moments(self) -> tuple[float, float]:
        assert self.mean is not None and self.std is not None
        return self.mean, self.std

    def _normal(self) -> tuple[float, float]:
        """Return mean and standard deviation of the logarithm."""
        if self.median is not None and self.sigma is not None:
            return log(self.median), self.sigma
        mean, std = self._moments()
        variance = log(1 + (std / mean) ** 2)
        return log(mean) - variance / 2, sqrt(variance)

    def _middle(self) -> float:
        """Return the mean of a beta distribution as a share of the way from low to high."""
        return (self._moments()[0] - self.low) / max(1, self.high - self.low)

    def _concentration(self) -> float:
        """Return a + b of the beta distribution with this mean and deviation, not positive if none exists."""
        middle, spread = self._middle(), self._moments()[1] / max(1, self.high - self.low)
        return middle * (1 - middle) / spread**2 - 1 if 0 < middle < 1 else 0.0


@dataclass(frozen=True, slots=True)
class Tail:
    """A share of the lengths that is drawn from another distribution."""

    share: float
    lengths: Lengths

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidValue(f"tail share={self.share!r} must be between 0 and 1", "share")

    def replace(self, random: np.random.Generator, drawn: Array) -> Array:
        """Redraw the share of the lengths that belongs to the tail."""
        long = random.random(len(drawn)) < self.share
        replaced: Array = np.where(long, self.lengths.draw(random, len(drawn)), drawn)
        return replaced


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A distribution of arrival times. The mean rate is an argument of `draw`.

    poisson: exponential gaps. even: constant gaps.
    gamma: gaps with coefficient of variation `cv` (the burstiness of vLLM's benchmark is 1/cv²).
    on_off: Poisson, alternating between `on` seconds and `off` seconds at a `contrast` times lower rate.
    bursts: a `share` of the requests comes in bursts of `size` on average (geometric), each spread evenly
        over `duty` of the mean time between bursts. The bursts, and the other requests, are Poisson. Times
        are stretched to the exact mean rate, which would otherwise differ by half between seeds if a run
        has few bursts.
    """

    kind: Literal["poisson", "gamma", "on_off", "even", "bursts"] = "poisson"
    cv: float = 1.0
    on: float = 10.0
    off: float = 30.0
    contrast: float = 10.0
    size: float = 20.0
    duty: float = 0.1
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("cv", "on", "off", "contrast", "duty"):
            if not 0 < getattr(self, name) < inf:
                raise InvalidValue(f"arrivals {name}={getattr(self, name)!r} must be positive", name)
        if not 1 <= self.size < inf:
            raise InvalidValue(f"arrivals size={self.size!r} must be at least 1", "size")
        if not 0 < self.share <= 1:
            raise InvalidValue(f"arrivals share={self.share!r} must be above 0 and at most 1", "share")

    def draw(self, random: np.random.Generator, count: int, rate: float) -> Array:
        """Draw `count` times in seconds, ascending. Raises InvalidValue if the rate is not positive."""
        if not 0 < rate < inf:
            raise InvalidValue(f"rate={rate!r} must be a positive number of requests per second", "qps")
        if self.kind == "even":
            times: Array = np.arange(count) / rate
        elif self.kind == "gamma":
            shape = 1 / self.cv**2
            times = np.cumsum(random.gamma(shape, 1 / (rate * shape), count))
        elif self.kind == "bursts":
            times = self._bursts(random, count) / rate
        else:
            times = np.cumsum(random.exponential(1 / rate, count))
        return self._waves(times) if self.kind == "on_off" else times

    def _waves(self, times: Array) -> Array:
        """Map Poisson times at the mean rate to times at which the on-off rate has accumulated as much."""
        period, share = self.on + self.off, self.on * self.contrast / (self.on * self.contrast + self.off)
        cycle, rest = np.floor(times / period), np.mod(times, period) / period
        inside = np.where(rest < share, rest / share * self.on, self.on + (rest - share) / (1 - share) * self.off)
        warped: Array = cycle * period + inside
        return warped

    def _bursts(self, random: np.random.Generator, count: int) -> Array:
        """Draw times at rate 1."""
        inside = int(random.binomial(count, self.share))
        sizes = random.geometric(1 / self.size, count)
        between = self.size / self.share
        starts = np.cumsum(random.exponential(between, count))
        bursts = np.repeat(starts, sizes.clip(max=count))[:inside]
        bursts = bursts + random.uniform(0, self.duty * between, inside)
        others = np.cumsum(random.exponential(1 / (1 - self.share), count - inside)) if inside < count else bursts[:0]
        times: Array = np.sort(np.concatenate([bursts, others]))
        times -= times[0]
        return times * ((count - 1) / times[-1]) if count > 1 and times[-1] > 0 else times
