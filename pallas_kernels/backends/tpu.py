"""placeholder"""

from __future__ import annotations

from pallas_kernels.backends.base import Attention, Spec


def supports(spec: Spec) -> str | None:
    return "it is not written yet"


def make(spec: Spec | None, decode: bool) -> Attention:
    raise NotImplementedError
