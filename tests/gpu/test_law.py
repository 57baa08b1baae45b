"""No schedule changes the tokens that come through the compiled kernels, and nothing compiles after warm-up.

One test per family of models; `benchmarks.gpu_day` runs two.
"""

from __future__ import annotations

import pytest

from tests.support.kernels.interpreted import on_gpu
from tests.support.parity.asks import asks
from tests.support.parity.wide import FAMILIES, hold, model, pressing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # in the interpreter, minutes


@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_changes_the_tokens(name: str) -> None:
    if on_gpu():
        hold(model(name), pressing(), "mosaic_gpu")
    else:  # slow, and its memory is that of one instance
        hold(model(name), asks(1, 2), "mosaic_gpu", "1x1", interpret=True)
