"""Errors of step-time models on measured steps: as fitted, and while learning online."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Load, PerfModel
from .buckets import NONE, Buckets
from .fit import kind
from .registry import KINDS, Step, make

KEPT = 5  # every fifth step is held out from the fit for evaluation


@dataclass(frozen=True, slots=True)
class Score:
    """Errors of a model as shares of the measured time. problem: why there is no model."""

    name: str
    mape: float | None = None
    median: float | None = None  # of the errors; far below the mean if a few steps took almost no time
    worst: float | None = None
    by_kind: Mapping[str, float] | None = None  # MAPE of prefill, decode and mixed steps, if they occur
    online: float | None = None  # MAPE if each step is predicted, then observed, in the order measured
    problem: str = ""


def compare(
    measured: Iterable[Step], names: Sequence[str] = KINDS, *, p_moe: float = 0.0, buckets: Buckets = NONE
) -> list[Score]:
    """Fit each model to four fifths of the steps and evaluate it on the others, or on all if there are fewer than 20.

    A model that cannot be fitted to the steps gets a `Score` with a problem. Raises InvalidValue without
    steps, or for an unknown name.

    measured: (load, seconds) in the order in which they ran. p_moe: share of the experts that a token uses.
    buckets: sizes that the engine padded the steps to.
    """
    steps = [(load, seconds) for load, seconds in measured if seconds > 0]
    if not steps:
        raise InvalidValue("no measured steps to compare models on", "measured")
    judged = [index for index in range(len(steps)) if len(steps) < 4 * KEPT or index % KEPT == KEPT - 1]
    rest = [step for index, step in enumerate(steps) if len(steps) < 4 * KEPT or index % KEPT < KEPT - 1]
    return [_score(name, rest, steps, judged, p_moe, buckets) for name in names]


def _score(
    name: str, rest: Sequence[Step], steps: Sequence[Step], judged: Sequence[int], p_moe: float, buckets: Buckets
) -> Score:
    try:
        model, learning = (make(name, points=rest, p_moe=p_moe, buckets=buckets) for _ in range(2))
    except InvalidValue as error:
        if error.param == "perf":
            raise
        return Score(name, problem=str(error))
    errors = np.array([_error(model, *steps[index]) for index in judged])
    kinds = np.array([kind(steps[index][0]) for index in judged])
    by_kind = {
        label: float(errors[kinds == label].mean()) for label in ("prefill", "decode", "mixed") if label in kinds
    }
    online = []
    for load, seconds in steps:
        online.append(_error(learning, load, seconds))
        learning.observe(load, seconds)
    return Score(
        name,
        mape=float(errors.mean()),
        median=float(np.median(errors)),
        worst=float(errors.max()),
        by_kind=by_kind,
        online=float(np.mean([online[index] for index in judged])),
    )


def _error(model: PerfModel, load: Load, seconds: float) -> float:
    return abs(model.step_time(load) / seconds - 1)
