"""Rotary position embedding (RoPE): its kinds and parameters, read from a config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.models.context_length import POSITIONS, Config, context_length, rope_given, rope_kind
from jaxserve.sched.api.errors import InvalidValue

ORIGINAL = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of rotary position embedding (RoPE). Fields after `theta` apply to the kinds named beside them."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original: int = 0  # llama3, yarn, longrope: context length before the extension
    low: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high: float = 1.0  # llama3: high_freq_factor; yarn: beta_fast
    scale: float = 1.0  # yarn, longrope: multiplies cos and sin
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    share: float = 1.0  # share of a head's dimensions that are rotated
    divisors: tuple[float, ...] = ()  # longrope: of each pair's frequency
    short: tuple[float, ...] = ()  # longrope: the divisors for contexts up to `original`
    interleaved: bool = False  # whether the checkpoint rotates pairs (2 i, 2 i + 1)

    def frequencies(self, dim: int) -> npt.NDArray[np.float32]:
        """Return radians per position of each pair, [D / 2]. Pairs that are not rotated come last, with 0."""
        turning = int(dim * self.share)
        still = np.zeros((dim - turning) // 2, np.float32)
        return np.concatenate([self._turning(turning), still])

    def scales(self, dim: int) -> npt.NDArray[np.float32]:
        """Return the factor of cos and sin of each pair, [D / 2]: 1 for pairs that are not rotated."""
        pairs = np.arange(dim // 2)
        return np.where(pairs < int(dim * self.share) // 2, self.scale, 1.0).astype(np.float32)

    def order(self, dim: int) -> npt.NDArray[np.int64]:
        """Return the checkpoint index of each dimension of a head [D], so that pair i is (i, i + D / 2).

        Checkpoints have the rotated dimensions first. The permutation does not change scores, because it
        applies to queries and keys alike.
        """
        turning = int(dim * self.share)
        first, rest = np.arange(dim)[:turning].reshape(2, -1), np.arange(dim)[turning:].reshape(2, -1)
        if self.interleaved:
            first = first.reshape(-1, 2).T
        return np.concatenate([first, rest], axis=1).reshape(-1)

    def _turning(self, dim: int) -> npt.NDArray[np.float32]:
        plain: npt.NDArray[np.float64] = self.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            plain = self._yarn(plain, dim)
        elif self.kind == "longrope":
            plain = plain / np.asarray(self.divisors)
        return plain.astype(np.float32)

    def _llama3(self, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Divide low frequencies by `factor`, keep high ones, and interpolate between them."""
        turns = self.original * plain / (2 * math.pi)  # rotations of each pair within the original context
        keep = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
        return np.asarray(keep * plain + (1 - keep) * plain / self.factor)

    def _yarn(self, plain: npt.NDArray[np.float64], dim: int) -> npt.NDArray[np.float64]:
        """Apply YaRN (arXiv 2309.00071, eq. 23): like llama3, but with a ramp over the index of the pair."""
        first, last = (
            dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (self.high, self.low)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
        return np.asarray(plain * (1 - ramp) + plain / self.factor * ramp)


PLAIN = Rope()


def read_rope(config: Config, *, partials: bool = False) -> tuple[Rope, int]:
    """Return the RoPE parameters and the maximum number of positions.

    Reads `rope_parameters`, and the older `rope_theta` with `rope_scaling`. partials: whether the family
    supports `partial_rotary_factor`. Raises InvalidValue.
    """
    given = rope_given(config)
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind, positions = rope_kind(given), context_length(config)
    nested = [name for name, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise InvalidValue(f"config.json: rope_parameters per layer type ({', '.join(nested)}) are not supported")
    if kind not in ROPE_TYPES:
        raise InvalidValue(f"config.json: rope_type={kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = float(given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and (not partials or not 0 < partial < 1):
        raise InvalidValue(f"config.json: partial_rotary_factor={partial} is not supported; supported is 1.0")
    # Dynamic scaling re-rotates the whole cache when a text exceeds `max_position_embeddings`, so that
    # tokens would depend on the schedule. Up to that length it equals the default, so we stop there.
    plain = Rope(kind, theta, share=partial)
    if kind in ("default", "dynamic"):
        return plain, positions
    stated = int(config.get("max_position_embeddings") or POSITIONS)
    original = int(given.get(ORIGINAL) or config.get(ORIGINAL) or stated)
    if kind == "longrope":
        return replace(plain, original=original, **_longrope(given, stated / original, original)), positions
    if given.get("factor") is None:
        raise InvalidValue(f"config.json: rope_type={kind!r} needs 'factor' in rope_parameters")
    factor = float(given["factor"])
    if kind == "linear":
        return replace(plain, factor=factor), positions
    if kind == "llama3":
        low, high = float(given.get("low_freq_factor") or 1.0), float(given.get("high_freq_factor") or 4.0)
        if not low < high:
            raise InvalidValue(f"config.json: low_freq_factor={low} must be below high_freq_factor={high}")
        return replace(plain, factor=factor, original=original, low=low, high=high), positions
    fast, slow = float(given.get("beta_fast") or 32.0), float(given.get("beta_slow") or 1.0)
    ends: dict[str, Any] = {"low": slow, "high": fast, "truncate": bool(given.get("truncate", True))}
    return replace(plain, factor=factor, original=original, scale=_yarn_scale(given), **ends), positions


def _longrope(given: Config, growth: float, original: int) -> dict[str, Any]:
    """Return the divisors of frequencies, and the scale of LongRoPE (arXiv 2402.13753), by field."""
    for key in ("long_factor", "short_factor"):
        if given.get(key) is None:
            raise InvalidValue(f"config.json: rope_type='longrope' needs {key!r} in rope_parameters", key)
    factor = float(growth if given.get("factor") is None else given["factor"])
    scale = given.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors, short = (tuple(map(float, given[key])) for key in ("long_factor", "short_factor"))
    return {"factor": factor, "scale": float(scale), "divisors": divisors, "short": short}


def _yarn_scale(given: Config) -> float:
    """Return YaRN's attention factor, which multiplies cos and sin. DeepSeek configs give it as a quotient."""

    factor = float(given["factor"])
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return yarn_growth(factor, float(given["mscale"])) / yarn_growth(factor, float(given["mscale_all_dim"]))
    return yarn_growth(factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention scaling for contexts extended by `factor` (arXiv 2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0
