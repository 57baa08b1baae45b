"""The interface of admission controls, which decide whether an instance can keep the SLO of a new request."""

from __future__ import annotations

from typing import Protocol

from ..api.instance_view import InstanceView
from ..api.request import Request


class Admission(Protocol):
    """An admission control. Called once per request, about the instance that the router chose."""

    refuse: bool  # refuse requests that are not admitted, instead of making them best effort

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        """Return whether `instance` can keep the SLO of `request`, which arrives at `now` (seconds)."""
