"""Recursive least squares of step times with forgetting, that neither diverges nor turns negative."""

from __future__ import annotations

import numpy as np

from ..api.perf import Array

DAMPING = 0.05  # of what loads leave unsaid, since they hardly vary in it, an update takes a twentieth


class Recursive:
    """Weights w >= 0 of seconds = row @ w, corrected a step at a time by least squares of the relative error.

    It keeps the normal equations, which sums of steps cannot make indefinite, where the usual recursion of the
    covariance loses that to rounding and diverges. Each update is a damped step towards their solution: loads that
    never vary move the weights together, and no further than they must. Writer: the model that holds it.

    anchor: rows that are never forgotten, such as a profile's, each divided by its seconds; they keep what serving does
    not tell. Together they weigh as much as `held` steps. forgetting: weight of all that was seen, at each step. every:
    the equations are solved once in so many steps.
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
        """Count rows as seen whose seconds were just what the weights say; each is divided by those."""
        self._normal = rows.T @ rows
        self._pulled = self._normal @ self.weights

    def update(self, row: Array, target: float) -> None:
        """One more step: a row and its seconds, both divided by the scale of their error."""
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
        """What updates change, for `restore`."""
        return self.weights, self._normal, self._pulled

    def restore(self, state: tuple[Array, ...]) -> None:
        """Forget the updates since `state`."""
        self.weights, self._normal, self._pulled = state

    def scale(self, by: float) -> None:
        """All seconds, those of the anchor too, are `by` times what they were; errors stay relative to them."""
        self.weights = by * self.weights
        self._normal, self._anchor = self._normal / by**2, self._anchor / by**2
        self._pulled, self._aim = self._pulled / by, self._aim / by


def _nonnegative(normal: Array, pulled: Array) -> Array:
    """The solution of the normal equations without what would be negative. To cut negative weights off a solution
    would leave the others as large as these had made them."""
    found = np.linalg.solve(normal, pulled).astype(float, copy=False)
    if found.min() >= 0:
        return found
    inside = np.ones(len(pulled), dtype=bool)
    while found.min() < 0:
        inside &= found >= 0
        found = np.zeros(len(pulled))
        found[inside] = np.linalg.solve(normal[np.ix_(inside, inside)], pulled[inside])
    return found
