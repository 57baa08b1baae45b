"""The law that tests/gpu/test_law.py states for compiled kernels holds with XLA, for the same models and requests."""

from __future__ import annotations

import pytest

from tests.support.parity.wide import FAMILIES, hold, model, pressing


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_changes_the_tokens_of_wide_models(name: str) -> None:
    hold(model(name), pressing(), "xla")
