"""The registry of admission controls. They admit a request, make it best effort, or refuse it."""

from __future__ import annotations

from ..registry import build
from .base import Admission

ADMISSIONS = {"dp": "dp:ByDP", "none": "none:AdmitAll", "pab": "prefill_budget:ByPrefillBudget"}


def make(name: str) -> Admission:
    """Create an admission control by name, such as `pab` or `pab:refuse`.

    Raises InvalidValue naming what is allowed.
    """
    admission: Admission = build(ADMISSIONS, name, "admission", __package__)
    return admission
