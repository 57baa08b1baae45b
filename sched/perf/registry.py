"""Step-time models by name, made from true coefficients or from measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Form, Load, PerfModel
from .buckets import NONE, Buckets, Padded
from .fit import fit
from .learned import LearnedModel
from .linear import LinearModel
from .model import Coefficients, Corrected, GeneralModel
from .poly import Polynomial
from .roofline import Roofline
from .table import BATCHES, LENGTHS, TableModel

Perf = Literal["learned", "general", "exact", "table", "table:ewma", "linear", "roofline", "roofline:published", "poly"]
KINDS: tuple[Perf, ...] = get_args(Perf)
Step = tuple[Load, float]  # a load and its seconds
EWMA = 0.05  # weight of a step in a table with a moving average


def make(
    kind: str,
    truth: Coefficients | None = None,
    *,
    points: Iterable[Step] | None = None,
    p_moe: float = 0.0,
    seed: int = 0,
    buckets: Buckets = NONE,
    loads: Iterable[Load] | None = None,
) -> PerfModel:
    """Create the model named `kind`, from true coefficients or from measured `points` (exactly one of the two).

    learned: the general form on padded loads, learned from every step.
    general: the general form, corrected online by one ratio. exact: never corrected.
    table: Kairos's lookup table with its historical mean. table:ewma: with a moving average.
    linear: FairBatching's linear model, recalibrated online.
    roofline: SLOs-Serve's, with a context term. roofline:published: without one.
    poly: FlowPrefill's polynomial.

    p_moe: share of the experts that a token uses, if made from points.
    seed: of the synthetic steps that are profiled if `truth` is given without `loads`.
    buckets: sizes that the devices pad steps to. Only learned, general and exact take them into account.

    Raises InvalidValue for an unknown name, or if the points do not determine the model.
    """
    check(kind)
    if (truth is None) == (points is None):
        raise InvalidValue("a step-time model requires either true coefficients or measured points", "points")
    name, _, option = kind.partition(":")
    if name in ("general", "exact"):
        return _general(truth or fit(points or (), p_moe, buckets).coefficients, buckets, correct=name == "general")
    if points is None:
        assert truth is not None
        form = _padded(truth, buckets)
        if name == "table":
            return TableModel.profiled(_general(truth, buckets), ewma=EWMA if option else None)
        points = [(load, form.step_time(load)) for load in (samples(truth, seed) if loads is None else loads)]
        p_moe = truth.p_moe
    if name == "table":
        return _table(list(points), EWMA if option else None)
    if name == "learned":
        return LearnedModel(points, buckets, p_moe=p_moe)
    return _FITTED[kind](list(points))


def check(kind: str) -> None:
    """Raise InvalidValue for an unknown name."""
    if kind not in KINDS:
        raise InvalidValue(f"perf={kind!r} must be one of {', '.join(KINDS)}", "perf")


def _padded(truth: Coefficients, buckets: Buckets) -> Form:
    return truth if buckets == NONE else Padded(truth, buckets)


def _general(truth: Coefficients, buckets: Buckets, *, correct: bool = True) -> PerfModel:
    if buckets == NONE:
        return GeneralModel(truth, correct=correct)
    return Corrected(_padded(truth, buckets), correct=correct)


_FITTED: dict[str, Callable[[Sequence[Step]], PerfModel]] = {
    "linear": LinearModel.fitted,
    "roofline": lambda steps: Corrected(Roofline.fitted(steps)),
    "roofline:published": lambda steps: Corrected(Roofline.fitted(steps, context=False)),
    "poly": lambda steps: Corrected(Polynomial.fitted(steps)),
}


def _table(points: list[Step], ewma: float | None) -> TableModel:
    """Create a table that has the measured sizes among its entries."""
    chunks = [(load.prefill, seconds) for load, seconds in points if load.prefill and not load.decode and seconds > 0]
    rows = [
        (load.decode, load.longest, seconds)
        for load, seconds in points
        if load.decode and not load.prefill and not load.drafts and seconds > 0
    ]
    if not chunks or not rows:
        raise InvalidValue("a table needs measured steps of prompt tokens alone and of decode rows alone", "points")
    batches = sorted({*BATCHES, *(row[0] for row in rows)})
    lengths = sorted({*LENGTHS, *(row[1] for row in rows if row[1] > 0)})
    table = TableModel(batches, lengths, prefill_rate=max(k / s for k, s in chunks), ewma=ewma)
    table.add(rows)
    return table


def samples(truth: Coefficients, seed: int = 0, count: int = 400) -> Iterator[Load]:
    """Generate steps to profile: chunks, decode batches and mixtures, as they occur in serving.

    Some steps draft if drafting takes time.
    """
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
