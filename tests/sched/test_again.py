"""Simulating a simulated run again must find the same: then what differs from a served one is the serving."""

from __future__ import annotations

import random

import pytest

from jaxserve.sched.errors import InvalidValue
from jaxserve.sched.journal import Replay, Step, replay
from jaxserve.sched.perf.model import Coefficients, Load
from jaxserve.sched.sim.again import again, noise, rows

from .harness import Job
from .test_journal import perf, recorded


@pytest.mark.parametrize("roles", ["1x1", "2x1", "4x1"])
def test_a_simulated_run_comes_out_again(roles: str) -> None:
    draw = random.Random(1)
    jobs = [Job(range(1000 * i, 1000 * i + draw.randint(1, 20)), draw.randint(2, 14), i * 0.004) for i in range(60)]
    outcome = again(replay(recorded(jobs, roles, "kairos").splitlines(), perf))
    assert outcome.fit.mape < 1e-6 and outcome.noise < 1e-6
    for name, served, simulated in rows(outcome):
        assert simulated == pytest.approx(served, rel=0.02), name
    assert outcome.busy == pytest.approx(outcome.simulated.busy, rel=0.02)


def test_what_an_instance_rehearsed_is_no_share_of_its_time() -> None:
    """It was before the first request came, so that the shares of a short run came to more than 1."""
    found = replay(recorded([Job(range(12), 6, 1.0)], "1x1", "kairos").splitlines(), perf)
    busy = again(found).busy
    found.steps += [step._replace(ended=step.ended - 1.0) for step in found.steps]
    assert again(found).busy == busy and all(0 < share <= 1 for share in busy)


def test_a_journal_without_a_finished_request_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no request of the journal has finished"):
        again(Replay())


def test_steps_to_which_a_fit_gives_no_time_do_not_count() -> None:
    """A few steps on a busy machine, whose times fell while they grew, have coefficients of 0."""
    found = Replay()
    taken = [(Load(decode=1), 0.003), (Load(prefill=4), 0.002), (Load(prefill=8), 0.004)]
    found.steps += [Step("one", load, seconds, ended=0.1, predicted=seconds) for load, seconds in taken]
    told = Coefficients(fixed=0, prefill=0.0005, decode=0, quadratic=0, longest=0, context=0)
    assert noise(found, told) == pytest.approx(0)
    assert noise(Replay(), told) == 0
