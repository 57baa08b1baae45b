"""What a simulation's schedulers predict step times with."""

from __future__ import annotations

from ..api.perf import PerfModel
from ..api.policy import Limits
from ..perf import make
from ..perf.buckets import NONE, Buckets
from ..perf.drafted import Drafted
from ..perf.model import Coefficients
from ..perf.profile import probes
from ..perf.scaled import Scaled

LONGEST = 131_072  # tokens of context, at most, that a profile looks at


def perf_model(
    kind: str,
    truth: Coefficients,
    seed: int = 0,
    error: float = 0.0,
    *,
    limits: Limits | None = None,
    buckets: Buckets = NONE,
) -> PerfModel:
    """The model `kind` (see perf.make) of devices whose true one is known; off by `error`, a share, for good.

    `learned` is what a server has: fitted to the steps that a server of these limits measures when it starts (see
    perf.profile), and learned from every step.
    """
    loads = None
    if kind == "learned" and limits is not None:
        loads = [probe.load for probe in probes(limits, LONGEST, buckets)]
    model = make(kind, truth, seed=seed, buckets=buckets, loads=loads)
    if kind == "learned" and limits is not None and limits.draft:
        model = Drafted(model)
    return Scaled(model, 1.0 + error) if error else model
