"""How many examples hypothesis draws for a test that asks for a number of its own."""

from __future__ import annotations

from hypothesis import settings

LEAST, USUAL = 5, 100


def examples(count: int) -> int:
    """`count` in the profile `full`, and as much less or more as the profile that runs says (tests/conftest.py)."""
    return max(LEAST, count * settings.default.max_examples // USUAL)
