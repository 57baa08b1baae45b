"""What an admission control is: it says whether an instance can keep a new request's SLO."""

from __future__ import annotations

from typing import Protocol

from ..api.instance_view import InstanceView
from ..api.request import Request


class Admission(Protocol):
    """Asked once per request, about the instance that the router chose."""

    refuse: bool  # refuse what is not admitted; otherwise it becomes best effort

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        """Whether `instance` can keep the SLO of `request`, which arrives at `now` (seconds)."""
