"""Scaling on the number of unfinished requests, as Ray Serve, KEDA and Knative do: the baseline."""

from __future__ import annotations

from ..api.errors import InvalidValue
from ..routing.base import Fleet
from .base import Arrived


class ByRequests:
    """A scaler that keeps `target` unfinished requests per replica, whatever their lengths."""

    def __init__(self, target: float = 16.0) -> None:
        if not target > 0:
            raise InvalidValue(f"{target=} must be more than 0 requests per replica", "scaling")
        self._target = target

    def needed(self, fleet: Fleet, arrivals: Arrived) -> float:
        return sum(map(len, fleet.instances)) / self._target
