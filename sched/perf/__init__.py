"""Step-time models: predict how long a step takes, and learn from measured steps."""

from .registry import KINDS, Perf, make

__all__ = ["KINDS", "Perf", "make"]
