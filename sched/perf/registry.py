"""Step-time models by name, made from a true one that is known or from measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from ..errors import InvalidValue
from .fit import fit
from .linear import LinearModel
from .model import Coefficients, Corrected, GeneralModel, Load, PerfModel
from .poly import Polynomial
from .roofline import Roofline
from .table import TableModel

Perf = Literal["general", "exact", "table", "table:ewma", "linear", "roofline", "roofline:published", "poly"]
KINDS: tuple[Perf, ...] = get_args(Perf)
Step = tuple[Load, float]  # and its seconds
EWMA = 0.05  # weight of a step in a table that forgets


def make(
    kind: str,
    truth: Coefficients | None = None,
    *,
    points: Iterable[Step] | None = None,
    p_moe: float = 0.0,
    seed: int = 0,
) -> PerfModel:
    """The model named `kind`, of devices whose true one is known, or fitted to measured `points` (one of the two).

    general: the general form, corrected online; exact: never corrected; table: Kairos's lookup table with its
    historical mean; table:ewma: with a moving average; linear: FairBatching's line, recalibrated; roofline: SLOs-
    Serve's, with a term of context; roofline:published: without; poly: FlowPrefill's. p_moe: share of the experts
    that a token uses, for points. seed: of the steps that are profiled where the truth is known.

    Raises InvalidValue for an unknown name, and where points cannot tell.
    """
    if kind not in KINDS:
        raise InvalidValue(f"perf={kind!r} must be one of {', '.join(KINDS)}", "perf")
    if (truth is None) == (points is None):
        raise InvalidValue("a step-time model is made from its true coefficients or from measured points", "points")
    name, _, option = kind.partition(":")
    if name == "table":
        return _table(truth, list(points or ()), EWMA if option else None)
    if name in ("general", "exact"):
        return GeneralModel(truth or fit(points or (), p_moe).coefficients, correct=name == "general")
    steps = list(points or ()) if truth is None else [(load, truth.step_time(load)) for load in samples(truth, seed)]
    return _FITTED[kind](steps)


_FITTED: dict[str, Callable[[Sequence[Step]], PerfModel]] = {
    "linear": LinearModel.fitted,
    "roofline": lambda steps: Corrected(Roofline.fitted(steps)),
    "roofline:published": lambda steps: Corrected(Roofline.fitted(steps, context=False)),
    "poly": lambda steps: Corrected(Polynomial.fitted(steps)),
}


def _table(truth: Coefficients | None, points: list[Step], ewma: float | None) -> TableModel:
    if truth is not None:
        return TableModel.profiled(GeneralModel(truth), ewma=ewma)
    chunks = [(load.prefill, seconds) for load, seconds in points if load.prefill and not load.decode and seconds > 0]
    rows = [(load.decode, load.longest, s) for load, s in points if load.decode and not load.prefill and s > 0]
    if not chunks or not rows:
        raise InvalidValue("a table needs measured steps of prompt tokens alone and of decode rows alone", "points")
    table = TableModel(prefill_rate=sum(k for k, _ in chunks) / sum(s for _, s in chunks), ewma=ewma)
    table.add(rows)
    return table


def samples(truth: Coefficients, seed: int = 0, count: int = 400) -> Iterator[Load]:
    """Steps to profile: chunks, decode batches and mixtures, as serving meets them; drafted ones where drafting takes
    time."""
    random = np.random.default_rng((seed, 7))
    for step in range(count):
        load = Load()
        if step % 3:
            rows = int(random.integers(1, 128))
            contexts = np.exp(random.normal(np.log(3000), 1.0, rows)).astype(int).clip(64, 131_072).tolist()
            drafts = step // 3 % 6 if truth.draft else 0
            load = Load(decode=rows * (1 + drafts), longest=max(contexts), context=sum(contexts), drafts=drafts)
        if step % 3 != 1:
            load = load.add_chunk(int(random.integers(64, 8193)), int(random.integers(0, 32_768)))
        yield load
