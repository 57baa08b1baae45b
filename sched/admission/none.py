"""Admission of every request."""

from __future__ import annotations

from ..api.instance_view import InstanceView
from ..api.request import Request


class AdmitAll:
    """An admission control that admits every request."""

    refuse = False

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        return True
