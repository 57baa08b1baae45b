"""The registry of scalers, which say how many replicas a load needs; one file each."""

from __future__ import annotations

from ..registry import build
from .base import Scaler

SCALERS = {
    "budget": "budget:ByBudget",
    "requests": "requests:ByRequests",
}


def make(name: str) -> Scaler:
    """Create a scaler by name, with options after a colon. Raises InvalidValue naming what is allowed."""
    scaler: Scaler = build(SCALERS, name, "scaling", __package__)
    return scaler
