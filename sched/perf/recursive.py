"""Recursive least squares of step times with forgetting that neither diverges nor turns negative."""

from __future__ import annotations

import numpy as np

from ..api.perf import Array

DAMPING = 0.05  # relative to the diagonal: weights move slowly in directions in which loads hardly vary


class Recursive:
    """Weights w >= 0 of seconds = row @ w, corrected step by step by least squares of the relative error.

    Keeps the normal equations, since a sum over steps cannot become indefinite. The usual recursion of the
    covariance can, by rounding, and then diverges. Each update is a damped step toward the solution: if
    loads never vary, the weights move together, and no further than necessary. Writer: the model that
    holds it.

    anchor: rows that are never forgotten, such as those of a profile, each divided by its seconds. They keep
        what serving does not show. Together they weigh as much as `held` steps.
    forgetting: factor on the weight of all earlier steps, at each step.
    every: steps between two solutions of the equations.
    """

    def __init__(
        self, weights: Array, forgetting: float, anchor: Array | None = None, held: float = 0.0, every: int = 1
    ) -> None:
        count = len(weights)
        self._every = every
        self._unsolved = 0
        self.weights = weights
        self._forgetting = forgetting
        self._normal = np.zeros((count, count))
        self._pulled = np.zeros(count)
        self._anchor = np.zeros((count, count))
        self._aim = np.zeros(count)
        if anchor is not None and len(anchor):
            self._anchor = anchor.T @ anchor * (held / len(anchor))
            self._aim = anchor.sum(axis=0) * (held / len(anchor))

    def know(self, rows: Array) -> None:
        """Count rows as seen, with seconds equal to the predicted ones, by which each row is divided."""
        self._normal = rows.T @ rows
        self._pulled = self._normal @ self.weights

    def update(self, row: Array, target: float) -> None:
        """Add one step: a row and its seconds, both divided by the scale of the error."""
        self._normal = self._forgetting * self._normal + row[:, None] * row
        self._pulled = self._forgetting * self._pulled + row * target
        self._unsolved += 1
        if self._unsolved < self._every:
            return
        self._unsolved = 0
        normal, pulled = self._normal + self._anchor, self._pulled + self._aim
        own = normal.diagonal()
        damping = np.where(own > 0, DAMPING * own, 1.0)
        damped = normal.copy()
        damped.flat[:: len(own) + 1] += damping
        self.weights = _nonnegative(damped, pulled + damping * self.weights)

    def state(self) -> tuple[Array, ...]:
        """Return what updates change, for `restore`."""
        return self.weights, self._normal, self._pulled

    def restore(self, state: tuple[Array, ...]) -> None:
        """Undo the updates since `state`."""
        self.weights, self._normal, self._pulled = state

    def scale(self, by: float) -> None:
        """Multiply all seconds by `by`, including those of the anchor. Errors stay relative."""
        self.weights = by * self.weights
        self._normal, self._anchor = self._normal / by**2, self._anchor / by**2
        self._pulled, self._aim = self._pulled / by, self._aim / by


def _nonnegative(normal: Array, pulled: Array) -> Array:
    """Solve the normal equations with weights >= 0.

    The variables that would be negative are removed and the rest is solved again. Clipping them instead
    would leave the others too large.
    """
    weights = np.linalg.solve(normal, pulled).astype(float, copy=False)
    if weights.min() >= 0:
        return weights
    inside = np.ones(len(pulled), dtype=bool)
    while weights.min() < 0:
        inside &= weights >= 0
        weights = np.zeros(len(pulled))
        weights[inside] = np.linalg.solve(normal[np.ix_(inside, inside)], pulled[inside])
    return weights
