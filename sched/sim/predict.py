"""Predictions that are wrong for good: what a policy is worth when its step-time model is off."""

from __future__ import annotations

from ..perf import make
from ..perf.model import Coefficients, PerfModel
from ..perf.scaled import Scaled


def perf_model(kind: str, truth: Coefficients, seed: int = 0, error: float = 0.0) -> PerfModel:
    """The model `kind` (see perf.make) of devices whose true one is known; off by `error`, a share, for good."""
    model = make(kind, truth, seed=seed)
    return Scaled(model, 1.0 + error) if error else model
