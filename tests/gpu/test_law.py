"""No schedule changes the tokens that come through the compiled kernels, and nothing compiles after warm-up."""

from __future__ import annotations

import pytest

from tests.support.kernels.interpreted import on_gpu
from tests.support.parity.asks import asks
from tests.support.parity.wide import FAMILIES, hold, model, pressing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # in the interpreter, minutes


@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_changes_the_tokens_of_a_family(name: str) -> None:
    requests = pressing() if on_gpu() else asks(1, 2)
    stopped, compared = hold(model(name), requests, "mosaic_gpu", interpret=not on_gpu())
    assert stopped <= 0.1 * compared, f"{stopped} of {compared} comparisons stopped at a close call"
