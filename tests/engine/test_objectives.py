"""Default objectives of requests: configured, or derived from step times."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ServeConfig
from jaxserve.engine.startup.objectives import DECODE, LEAST, LONGEST, PREFILL, promise
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.perf.model import Coefficients, GeneralModel

LIMITS = Limits(512, 16, 256, 16)  # tokens and rows of a step, pages of 16 tokens
SLOW = GeneralModel(Coefficients(0.05, 2e-3, 3e-3, 0.0, 5e-8, 5e-8))


def test_auto_is_a_documented_multiple_of_the_step_times_at_full_batch() -> None:
    made = promise(ServeConfig(), SLOW, LIMITS, 2048)
    context = 256 * 16 // 16 // 2
    step = SLOW.step_time(Load().add_rows(16, context, 16 * context))
    chunks = [SLOW.step_time(Load().add_chunk(512, start)) for start in range(0, 2048, 512)]
    assert DECODE * step <= made.slo.tpot <= 1.1 * DECODE * step
    assert PREFILL * sum(chunks) <= made.slo.ttft <= 1.1 * PREFILL * sum(chunks)
    assert made.automatic == {"ttft", "tpot"} and not made.broken


def test_configured_objectives_override_measured_ones() -> None:
    made = promise(ServeConfig.load(tpot_slo="200ms"), SLOW, LIMITS, 2048)
    assert made.slo.tpot == 0.2 and made.automatic == {"ttft"} and made.slo.ttft > 1
    both = promise(ServeConfig(ttft_slo=3.0, tpot_slo=0.3), SLOW, LIMITS, 2048)
    assert both.slo == SLO(3.0, 0.3) and not both.automatic and not both.broken


def test_infeasible_objectives_are_reported() -> None:
    made = promise(ServeConfig(ttft_slo=0.5, tpot_slo=0.05), SLOW, LIMITS, 2048)
    assert set(made.broken) == {"ttft", "tpot"}
    assert made.broken["tpot"].startswith("tpot_slo=50ms cannot be met: a decode step of 4 requests takes ")
    assert made.broken["ttft"].startswith("ttft_slo=500ms cannot be met: a prompt of 512 tokens alone takes 1.")


@given(
    base=st.floats(0, 10), token=st.floats(0, 0.1), rows=st.integers(1, 512), length=st.integers(2, 200_000)
)  # fmt: skip
def test_auto_objectives_are_always_feasible(base: float, token: float, rows: int, length: int) -> None:
    perf = GeneralModel(Coefficients(base, token, 0.0, 0.0, 0.0, 0.0))
    limits = Limits(512, rows, 4096, 16)
    made = promise(ServeConfig(), perf, limits, length)
    assert made.slo.tpot >= max(LEAST.tpot, perf.step_time(Load().add_rows(rows, 1, rows)))
    assert made.slo.ttft >= max(LEAST.ttft, perf.step_time(Load().add_chunk(min(length, 512, LONGEST), 0)))
    again = promise(ServeConfig(ttft_slo=made.slo.ttft, tpot_slo=made.slo.tpot), perf, limits, length)
    assert again.slo == made.slo and not again.broken


def test_without_a_machine_auto_sets_no_objective() -> None:
    assert ServeConfig().slo == NO_SLO
    assert ServeConfig(tpot_slo=0.1).slo == SLO(inf, 0.1)
    assert ServeConfig.load(thinking_tpot_slo="20ms").slo.stages == (("thinking", 0.02),)


@pytest.mark.parametrize("text", ["never", "Auto", "-1s", "0"])
def test_invalid_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"auto|positive"):
        _ = ServeConfig.load(ttft_slo=text)
