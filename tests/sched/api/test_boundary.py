"""Spellings of the preemption boundary."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.preemption import Boundary


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chunk", (0, False)),
        ("layer", (1, False)),
        ("op", (1, True)),
        ("layers:1", (1, False)),
        ("layers:12", (12, False)),
    ],
)
def test_every_spelling_is_parsed(text: str, expected: tuple[int, bool]) -> None:
    assert Boundary.parse(text) == expected


@pytest.mark.parametrize("text", ["", "layers", "layers:0", "layers:-1", "layers:x", "half", "Layer", "layer:2"])
def test_invalid_boundaries_are_named(text: str) -> None:
    with pytest.raises(InvalidValue, match="must be op, layer, layers:K or chunk"):
        Boundary.parse(text)
