"""Fits of coefficients: published points solved exactly, or measured steps by least squares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Array, Load
from .buckets import NONE, Buckets
from .model import Coefficients

LINEAR = ("fixed", "w_moe", "prefill", "decode", "quadratic", "longest", "context", "draft")  # all but p_moe
ROUNDS = 30  # limit of a fit that converges in about five


@dataclass(frozen=True, slots=True)
class Point:
    """A published time in seconds.

    prefill: a prompt of `tokens`, alone, in chunks. decode: one step of `batch` requests with a context of
    `tokens` each.
    """

    kind: Literal["prefill", "decode"]
    tokens: int
    seconds: float
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "seconds", "batch"):
            if not getattr(self, name) > 0:
                raise InvalidValue(f"point {name}={getattr(self, name)!r} must be positive", name)

    def loads(self, chunk: int) -> list[Load]:
        """Return the steps that add up to this point."""
        if self.kind == "decode":
            return [Load(decode=self.batch, longest=self.tokens, context=self.tokens * self.batch)]
        starts = range(0, self.tokens, chunk)
        return [Load().add_chunk(min(chunk, self.tokens - start), start) for start in starts]


def row(load: Load, p_moe: float) -> tuple[float, ...]:
    """Return the factors of the LINEAR coefficients in the time of a step."""
    moe = 1.0 - (1.0 - p_moe) ** load.tokens
    return 1.0, moe, load.prefill, load.decode, load.quadratic, load.longest, load.context - load.longest, load.drafts


def solve(points: Sequence[Point], assumed: Mapping[str, float], chunk: int = 8192) -> Coefficients:
    """Find the coefficients not in `assumed` that reproduce the points.

    Exact if there are as many points as unknowns. With more points, least squares of the relative error.
    Raises InvalidValue if the points do not determine the unknowns.
    """
    known = {field.name for field in fields(Coefficients)}
    for name in assumed:
        if name not in known:
            raise InvalidValue(f"assumed {name!r} must be one of {', '.join(sorted(known))}", name)
    p_moe = assumed.get("p_moe", 0.0)
    absent = ("draft",) if p_moe else ("draft", "w_moe")  # no point has drafts
    unknown = [name for name in LINEAR if name not in assumed and name not in absent]
    table = np.array([np.sum([row(load, p_moe) for load in point.loads(chunk)], axis=0) for point in points])
    seconds = np.array([point.seconds for point in points])
    if len(points) < len(unknown):
        raise InvalidValue(f"{len(points)} points cannot determine {', '.join(unknown)}: assume some of them", "points")
    given = np.array([0.0 if name in unknown else assumed.get(name, 0.0) for name in LINEAR])
    columns = [LINEAR.index(name) for name in unknown]
    target = (seconds - table @ given) / seconds
    solution, rank = _least_squares(table[:, columns] / seconds[:, None], target)
    if rank < len(unknown):
        raise InvalidValue(f"the points cannot tell {', '.join(unknown)} apart: assume some of them", "points")
    values = dict(zip(unknown, solution.tolist(), strict=True))
    negative = [f"{name}={value:.3g}" for name, value in values.items() if value < 0]
    if negative:
        raise InvalidValue(f"the points and the assumed values make {', '.join(negative)} negative", "points")
    return Coefficients(**dict.fromkeys(LINEAR, 0.0) | dict(assumed) | values)


def _least_squares(table: Array, target: Array) -> tuple[Array, int]:
    """As numpy's, after scaling the columns to one norm: their magnitudes range from 1 to tokens squared."""
    size = np.linalg.norm(table, axis=0)
    size[size == 0] = 1.0
    solution, _, rank, _ = np.linalg.lstsq(table / size, target, rcond=1e-10)
    result: Array = solution / size
    return result, int(rank)


class Fit(NamedTuple):
    """Fitted coefficients and their errors, as shares: mean and largest absolute relative error."""

    coefficients: Coefficients
    mape: float
    worst: float
    by_kind: Mapping[str, float]  # MAPE of prefill, decode and mixed steps, if they occur
    steps: int


def fit(measured: Iterable[tuple[Load, float]], p_moe: float = 0.0, buckets: Buckets = NONE) -> Fit:
    """Fit coefficients >= 0 to (load, seconds) of single steps, padded to `buckets` (see `proportional`).

    Raises InvalidValue without steps.

    p_moe: experts per token / experts, a fact of the model; 0 for dense models.
    """
    steps = [(buckets.placed(load)[1], seconds) for load, seconds in measured if seconds > 0]
    if not steps:
        raise InvalidValue("no measured steps to fit", "measured")
    seconds = np.array([time for _, time in steps])
    table = np.array([row(load, p_moe) for load, _ in steps], dtype=float)
    solution = proportional(table, seconds)
    predicted = table @ solution
    error = np.abs(predicted / seconds - 1)
    kinds = np.array([kind(load) for load, _ in steps])
    by_kind = {name: float(error[kinds == name].mean()) for name in ("prefill", "decode", "mixed") if name in kinds}
    coefficients = Coefficients(**dict(zip(LINEAR, solution.tolist(), strict=True)), p_moe=p_moe)
    return Fit(coefficients, float(error.mean()), float(error.max()), by_kind, len(steps))


def kind(load: Load) -> str:
    """Classify a step as prefill, decode or mixed."""
    if load.prefill and load.decode:
        return "mixed"
    return "prefill" if load.prefill else "decode"


def proportional(table: Array, seconds: Array) -> Array:
    """Find coefficients >= 0 with predictions that are too long and too short by equal factors on average.

    This is least squares of the logarithm of predicted/measured, by Gauss-Newton, starting from least
    squares of the relative error. The latter alone follows the fastest steps: if times vary by a factor of
    three, as on a shared machine, it predicts a tenth of the usual time.

    seconds: all positive.
    """
    solution = nonnegative(table / seconds[:, None], np.ones(len(seconds)))
    predicted = table @ solution
    if not np.all(predicted > 0):
        return solution  # rows of zeros: the coefficients cannot explain these steps
    solution *= float(np.exp(np.mean(np.log(seconds / predicted))))
    error = log_error(table @ solution, seconds)
    for _ in range(ROUNDS):
        predicted = table @ solution
        aim = nonnegative(table / predicted[:, None], 1.0 + np.log(seconds / predicted))
        trials = [solution + step * (aim - solution) for step in (1.0, 0.5, 0.1, 0.01)]
        errors = [log_error(table @ trial, seconds) for trial in trials]
        best = int(np.argmin(errors))
        gained = error - errors[best]
        if gained <= 0:
            break
        solution, error = trials[best], errors[best]
        if gained <= 1e-9 * error:
            break
    return solution


def log_error(predicted: Array, seconds: Array) -> float:
    """Return the sum of squared logarithms of predicted/measured: inf if some prediction is not positive."""
    return float(np.sum(np.log(predicted / seconds) ** 2)) if np.all(predicted > 0) else float("inf")


def to_total(
    coefficients: Coefficients, measured: Iterable[tuple[Load, float]], buckets: Buckets = NONE
) -> Coefficients:
    """Scale the coefficients so that all steps together take as long as measured.

    A fit describes the usual step, but slow moments of a machine are rare and long.
    """
    steps = [(buckets.placed(load)[1], seconds) for load, seconds in measured]
    ratio = sum(seconds for _, seconds in steps) / sum(coefficients.step_time(load) for load, _ in steps)
    return replace(coefficients, **{name: ratio * getattr(coefficients, name) for name in LINEAR})


def nonnegative(table: Array, target: Array) -> Array:
    """Solve least squares with coefficients >= 0 (Lawson and Hanson).

    Columns join while they lower the error, and leave when they would turn negative. The coefficient of a
    column of zeros is zero.
    """
    size = np.linalg.norm(table, axis=0)
    table = table / np.where(size > 0, size, 1.0)
    count = table.shape[1]
    inside = np.zeros(count, dtype=bool)
    solution: Array = np.zeros(count)
    for _ in range(10 * count):
        pull = table.T @ (target - table @ solution)
        pull[inside | (size == 0)] = -np.inf
        best = int(np.argmax(pull))
        if pull[best] <= 1e-10 * max(1.0, float(np.linalg.norm(target))):
            break
        inside[best] = True
        while inside.any():
            trial = np.zeros(count)
            trial[inside] = np.linalg.lstsq(table[:, inside], target, rcond=1e-10)[0]
            below = inside & (trial <= 0)
            if not below.any():
                solution = trial
                break
            step = np.min(solution[below] / np.maximum(solution[below] - trial[below], 1e-300))
            solution = np.maximum(solution + step * (trial - solution), 0.0)
            inside &= solution > 1e-12
    result: Array = solution / np.where(size > 0, size, 1.0)
    return result
