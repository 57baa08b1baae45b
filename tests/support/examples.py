"""Numbers of hypothesis examples by profile."""

from __future__ import annotations

from hypothesis import settings

LEAST, USUAL = 5, 100


def examples(count: int) -> int:
    """Return `count` in the profile `full`, scaled for the other profiles (tests/conftest.py)."""
    return max(LEAST, count * settings.default.max_examples // USUAL)
