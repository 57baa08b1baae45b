"""Laws of a whole simulation, also of requests in rounds, of thinking, and of replicas that start and stop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Decision, Grant, View
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.sim import NAMED, Arrival, Latency, Mesh, Options, Report, simulate
from jaxserve.sched.sim.executor import END_THINKING
from jaxserve.sched.sim.options import Scaling
from jaxserve.yamlio import load_yaml
from tests.support.examples import examples
from tests.support.sched.cost import calls
from tests.support.sched.presets import CHAT, ROOT, TINY

H200 = load_yaml(ROOT / "configs" / "latency" / "minimax-m2.5-h200-tp4.yaml", Latency)


def test_requests_that_never_fit_are_rejected_and_miss_their_slo() -> None:
    arrivals = [Arrival(0.0, 500, 5), Arrival(0.0, 10, 5)]
    report = simulate(arrivals, "distserve", "2x1", TINY)
    assert report.summary.reasons == {"rejected": 1, "stop": 1}
    assert [one.attained for one in report.measured] == [False, True]


def test_a_horizon_leaves_later_requests_unfinished_and_missing_their_slo() -> None:
    arrivals = [Arrival(0.0, 10, 5), Arrival(0.0, 10, 10_000)]
    options = Options(horizon=0.01, pages=10_000)
    report = simulate(arrivals, "distserve", "1x1", TINY, options=options)
    assert report.summary.reasons == {"stop": 1, "unfinished": 1} and report.ended == pytest.approx(0.01)


def test_traces_are_rescaled_to_a_rate() -> None:
    arrivals = [Arrival(2.0 * n, 5, 2) for n in range(11)]
    slow, fast = simulate(arrivals, "distserve", "1x1", TINY), simulate(arrivals, "distserve", "1x1", TINY, qps=5)
    assert (slow.rate, fast.rate) == (0.5, 5)
    assert slow.ended == pytest.approx(20, abs=0.1) and fast.ended == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": "2x2", "qps": 1.0}, "2 devices per instance.*tiny is for 1"),
        ({"mesh": "two"}, "mesh='two' must be RxT"),
        ({"mesh": Mesh(2)}, "give qps"),
        ({"policy": "nice", "qps": 1.0}, "unknown policy 'nice'"),
        ({"qps": 0.0}, "rate=0.0"),
        ({"workload": []}, "workload has no requests"),
        ({"qps": 1.0, "options": Options(perf="magic")}, "perf='magic'"),  # type: ignore[arg-type]
        ({"qps": 1.0, "options": Options(boundary="half")}, "boundary='half'"),
    ],
)
def test_invalid_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"workload": CHAT, "policy": "distserve", "mesh": "2x1", "latency": TINY} | change
    with pytest.raises(InvalidValue, match=message):
        simulate(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: Mesh(2, prefill=2), lambda: Mesh(1, prefill=1), lambda: Mesh(4, prefill=0)])
def test_a_mesh_needs_prefill_and_decode(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidValue, match="prefill="):
        make()


def test_a_step_of_a_simulation_costs_little() -> None:
    """Bound the calls of the scheduler and the simulator for a step of K128 at 3/s on eight devices."""
    reports: list[Report] = []
    made = calls(lambda: reports.append(simulate(NAMED["K128"], "kairos", "2x4", H200, qps=3, num_requests=15)))
    assert reports[0].summary.count == 15 and made <= 1000 * reports[0].counters.steps


# 30 ms a step, 0.2 ms a prompt token
LATENCY = replace(TINY, kv_tokens=200_000, page_size=16, coefficients=Coefficients(0.03, 2e-4, 1e-4, 0.0, 0.0, 0.0))
SLOW, FAST = 0.5, 10.0  # requests per second


def load() -> list[Arrival]:
    """Return 12 quiet seconds, 12 busy ones, and 12 quiet ones."""
    times: list[float] = []
    for begin, rate in ((0, SLOW), (12, FAST), (24, SLOW)):
        times += [begin + at / rate for at in range(int(12 * rate))]
    return [Arrival(time, 2000, 40, SLO(ttft=4.0, tpot=0.2)) for time in times]


def run(scaler: str, **more: float) -> tuple[object, float, float]:
    options = Options(scaling=Scaling(scaler, startup=5.0, period=2.0, hold=15.0, **more))  # type: ignore[arg-type]
    report = simulate(load(), "unified", Mesh(6, colocated=True), LATENCY, options=options)
    return report.summary.reasons, report.replica_seconds, report.ended


@pytest.mark.parametrize("scaler", ["budget", "requests:target=8"])
def test_no_request_is_lost_and_replicas_follow_the_load(scaler: str) -> None:
    reasons, seconds, ended = run(scaler)
    assert reasons == {"stop": len(load())}
    assert ended < seconds < 6 * ended  # more than one replica, fewer than all


def test_without_scaling_all_replicas_cost() -> None:
    report = simulate(load()[:40], "unified", Mesh(3, colocated=True), LATENCY)
    assert report.replica_seconds == pytest.approx(3 * report.ended)


@pytest.mark.parametrize("begin", [0, 7])
def test_the_first_replicas_must_be_in_the_mesh(begin: int) -> None:
    with pytest.raises(InvalidValue, match=f"begin={begin}"):
        run("budget", begin=begin)


def test_scaling_needs_mixed_instances() -> None:
    with pytest.raises(InvalidValue, match="colocated"):
        simulate(load()[:4], "unified", Mesh(4), LATENCY, options=Options(scaling=Scaling()))


QUIET = replace(TINY, noise=0.0)


def test_a_round_arrives_after_the_last_token_of_the_previous_one() -> None:
    chain = [
        Arrival(0.5, 20, 4, hash_ids=(1 << 33,), block=1 << 24),
        Arrival(0.5, 34, 3, hash_ids=(1 << 33,), block=1 << 24, after=0, delay=2.0),
        Arrival(0.5, 47, 2, hash_ids=(1 << 33,), block=1 << 24, after=1, delay=0.25),
        Arrival(0.6, 10, 2),
    ]
    report = simulate(chain, "distserve", "2x1", QUIET, options=Options(routing_delay=0.01))
    first, second, third, _ = sorted(report.measured)
    assert second.arrival == pytest.approx(first.ended + 2.0) and third.arrival == pytest.approx(second.ended + 0.25)
    assert report.summary.reasons == {"stop": 4}
    assert report.counters.prefix_hits > 0  # the previous round is in the cache


def test_rounds_after_a_refused_one_never_arrive() -> None:
    chain = [Arrival(0.0, 5000, 4), Arrival(0.0, 10, 1, after=0), Arrival(0.0, 10, 1, after=1), Arrival(0.0, 10, 1)]
    recorder = Recorder()
    report = simulate(chain, "distserve", "1x1", QUIET, recorder=recorder)
    assert report.summary.reasons == {"rejected": 3, "stop": 1}
    assert [one.attained for one in sorted(report.measured)] == [False, False, False, True]
    assert recorder.requests[2].error == "the round before it did not finish"


class Drafts:
    """A policy that runs everything at once and drafts as much as rows may."""

    def decide(self, view: View) -> Decision:
        rows = tuple(Grant(one.id, one.remaining, view.limits.draft) for one in view.decode)
        return Decision((*rows, *(Grant(one.id, one.remaining) for one in view.prefill)))


@settings(deadline=None, max_examples=examples(40))
@given(thought=st.integers(1, 12), answer=st.integers(0, 12), draft=st.integers(0, 3), seed=st.integers(0, 5))
def test_thinking_ends_at_its_token_and_the_answer_has_its_own_objective(
    thought: int, answer: int, draft: int, seed: int
) -> None:
    slo = SLO(1.0, 0.05, stages=((THINKING, 0.02),))
    arrivals = [Arrival(0.0, 10, thought + answer, slo, thinking_tokens=thought)]
    recorder = Recorder()
    report = simulate(
        arrivals, Drafts, "2x1", QUIET, seed, recorder=recorder, options=Options(draft=draft, acceptance=0.5)
    )
    request = recorder.requests[0]
    assert (report.counters.drafted > 0) == (draft > 0 and thought + answer > 1)
    assert len(request.output) == thought + answer and report.summary.reasons == {"stop": 1}
    ends = [place for place, token in enumerate(request.output, 1) if token == END_THINKING]
    assert ends == ([thought] if answer else [])
    assert request.stage == ("answer" if answer else THINKING)
