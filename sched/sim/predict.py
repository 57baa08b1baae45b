"""The step-time models that the schedulers of a simulation predict with."""

from __future__ import annotations

from ..api.perf import PerfModel
from ..api.policy import Limits
from ..perf import make
from ..perf.buckets import NONE, Buckets
from ..perf.drafted import Drafted
from ..perf.model import Coefficients
from ..perf.profile import probes
from ..perf.scaled import Scaled

LONGEST = 131_072  # tokens: longest context in a profile


def perf_model(
    kind: str,
    truth: Coefficients,
    seed: int = 0,
    error: float = 0.0,
    *,
    limits: Limits | None = None,
    buckets: Buckets = NONE,
) -> PerfModel:
    """Create the model `kind` (see perf.registry.make) for devices with known step times.

    `learned` is created as a server does: fitted to the steps that a server with these limits profiles at
    startup (see perf.profile), then learned from every step.

    error: constant relative error of all predictions.
    """
    loads = None
    if kind == "learned" and limits is not None:
        loads = [probe.load for probe in probes(limits, LONGEST, buckets)]
    model = make(kind, truth, seed=seed, buckets=buckets, loads=loads)
    if kind == "learned" and limits is not None and limits.draft:
        model = Drafted(model)
    return Scaled(model, 1.0 + error) if error else model
