"""Simulating a simulated run again gives the same results, so differences from a served run come from serving."""

from __future__ import annotations

import io
import random
from dataclasses import replace

import pytest

from jaxserve.cli.replay import show
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.journal import Replay, replay
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.sim import simulate
from jaxserve.sched.sim.again import again, rows
from jaxserve.sched.sim.arrival import Arrival
from jaxserve.sched.sim.latency import Latency
from jaxserve.sched.sim.options import Options
from tests.support.sched.harness import COEFFICIENTS, Job
from tests.support.sched.recorded import journaled, perf, recorded


@pytest.mark.parametrize("roles", ["1x1", "2x1", "4x1"])
def test_a_simulated_run_is_reproduced(roles: str) -> None:
    draw = random.Random(1)
    jobs = [Job(range(1000 * i, 1000 * i + draw.randint(1, 20)), draw.randint(2, 14), i * 0.004) for i in range(60)]
    outcome = again(replay(recorded(jobs, roles, "kairos").splitlines(), perf))
    assert outcome.fit.mape < 1e-6 and outcome.noise < 1e-6
    for name, served, simulated in rows(outcome):
        assert simulated == pytest.approx(served, rel=0.02), name
    assert outcome.busy == pytest.approx(outcome.simulated.busy, rel=0.02)


def test_thinking_is_reproduced() -> None:
    """Half of each answer is thinking with a loose TPOT, and the rest has a TPOT that no step meets."""
    file = io.StringIO()
    slo = SLO(ttft=8.0, tpot=1e-6, stages=((THINKING, 1.0),))
    shares = {0: 0, 1: 20, 2: 12}  # of 20 tokens
    arrivals = [
        Arrival(0.5 * i, 40, 20, replace(slo, stages=slo.stages if thought else ()), thinking_tokens=thought)
        for i, thought in shares.items()
    ]
    latency = Latency("test", kv_bytes_per_token=1, kv_tokens=4096, coefficients=COEFFICIENTS)
    recipe = Recipe("general", coefficients=COEFFICIENTS)
    simulate(arrivals, "distserve", "1x1", latency, logs=journaled(file, recipe))
    found = replay(file.getvalue().splitlines(), perf)
    assert found.differences == []
    assert found.thoughts == {1: 20, 2: 12}
    kept = [one.tpot_attained for one in again(found).simulated.measured]
    assert kept == [False, True, True], "the third request gets its allowance from eleven thinking tokens"


def test_steps_are_preempted_again_at_the_journaled_segments() -> None:
    """Short prompts preempt long ones in eight segments, each dispatched before it begins, or all at once."""
    coefficients = replace(COEFFICIENTS, prefill=5e-5)
    latency = Latency("test", kv_bytes_per_token=1, kv_tokens=65536, coefficients=coefficients, layers=8)
    recipe = Recipe("exact", coefficients=coefficients)
    long, short = SLO(ttft=3.0, tpot=1.0), SLO(ttft=0.1, tpot=1.0)
    pairs = [(Arrival(0.5 * i, 6000, 2, long), Arrival(0.5 * i + 0.1, 600, 2, short)) for i in range(8)]
    arrivals = [one for pair in pairs for one in pair]
    stops = {}
    for lead in (0.0, 8.0):
        file, options = io.StringIO(), Options(perf="exact", lead=lead)
        logs = journaled(file, recipe, {"segments": 8, "lead": lead})
        first = simulate(arrivals, "flowprefill", "1x1", latency, options=options, logs=logs)
        found = replay(file.getvalue().splitlines(), lambda record: Recipe.of(record).make())
        second = again(found).simulated
        assert found.differences == [] and second.counters.suspended == first.counters.suspended
        assert second.summary.ttft.p50 == pytest.approx(first.summary.ttft.p50, rel=0.02)
        stops[lead] = second.counters.suspended
    assert stops[0.0] > 0, "the journal's segments are those simulated"
    assert stops[8.0] != stops[0.0]


def test_warm_up_steps_do_not_count_as_busy_time() -> None:
    """Warm-up ends before the first request arrives, and counted, the shares of a short run would exceed 1."""
    found = replay(recorded([Job(range(12), 6, 1.0)], "1x1", "kairos").splitlines(), perf)
    busy = again(found).busy
    found.steps += [step._replace(ended=step.ended - 1.0) for step in found.steps]
    assert again(found).busy == busy and all(0 < share <= 1 for share in busy)


def test_times_that_fit_no_model_are_reported_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps on a busy machine vary like this: the same size takes 1 ms and 30 ms."""
    jobs = [Job(range(100 * i, 100 * i + 8), 12, i * 0.004) for i in range(20)]
    found = replay(recorded(jobs, "1x1", "kairos").splitlines(), perf)
    show(found, 0)
    assert "off by 0% on average" in (said := capsys.readouterr().out) and "says little" not in said
    found.steps[:] = [step._replace(seconds=(0.001, 0.03)[at % 2]) for at, step in enumerate(found.steps)]
    show(found, 0)
    assert "the simulated column says little" in capsys.readouterr().out


def test_a_journal_without_a_finished_request_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no request of the journal has finished"):
        again(Replay())
