"""Step-time models: how long a step will take, said before and corrected after."""

from .registry import KINDS, Perf, make

__all__ = ["KINDS", "Perf", "make"]
