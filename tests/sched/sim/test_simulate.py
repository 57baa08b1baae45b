"""Laws of a whole simulation: equal seeds give equal histories, nothing is lost, and time never goes backward."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.log import Log
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.journal import Journal
from jaxserve.sched.sim import NAMED, Arrival, Latency, Mesh, Options, Report, load_trace, simulate
from jaxserve.sched.sim.workload import Arrivals
from jaxserve.yamlio import load_yaml
from tests.support.cost import calls
from tests.support.sched.presets import CHAT, ROOT, TINY

TRACES = ROOT.parent / "shared" / "traces"
H200 = load_yaml(ROOT / "configs" / "latency" / "minimax-m2.5-h200-tp4.yaml", Latency)
POLICIES = ["distserve", "kairos", "prefill=kairos,decode=continuous"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", [Mesh(1), Mesh(2), Mesh(4, prefill=1), Mesh(3, colocated=True)], ids=str)
def test_every_request_is_served_on_every_mesh(policy: str, mesh: Mesh) -> None:
    report = simulate(CHAT, policy, mesh, TINY, qps=50, num_requests=120)
    lengths = [arrival.output_tokens for arrival in CHAT.draw(120, 50, 0)]
    assert [one.output for one in sorted(report.measured)] == lengths
    assert report.summary.reasons == {"stop": 120}
    assert report.counters.generated_tokens == sum(lengths)
    assert all(0 < share <= 1 for share in report.busy)


def journaled(seed: int, policy: str, perf: str = "general") -> tuple[str, Report]:
    file = io.StringIO()
    journal = Journal(file)

    def logs(name: str, policy: str, limits: Limits, role: Role, prefix_caching: bool) -> Log:
        return journal.instance(name, policy=policy, limits=limits, role=role, prefix_caching=prefix_caching, perf={})

    options = Options(perf=perf)  # type: ignore[arg-type]
    report = simulate(CHAT, policy, "4x1", TINY, seed, qps=80, num_requests=80, logs=logs, options=options)
    return file.getvalue(), report


@pytest.mark.parametrize(
    ("policy", "perf"), [*((policy, "general") for policy in POLICIES), ("kairos", "table"), ("kairos", "linear")]
)
def test_the_same_seed_gives_the_same_journal(policy: str, perf: str) -> None:
    first, again = journaled(1, policy, perf), journaled(1, policy, perf)
    assert first == again
    assert journaled(2, policy, perf)[0] != first[0]


def test_a_single_request_takes_the_time_that_the_model_predicts() -> None:
    quiet = replace(TINY, noise=0.0)
    truth = quiet.solve()
    [one] = simulate([Arrival(0.5, 40, 3, SLO())], "distserve", "1x1", quiet).measured
    assert one.ttft == pytest.approx(truth.fixed + 40 * truth.prefill + truth.quadratic * 800)
    steps = [truth.fixed + truth.decode + truth.longest * context for context in (40, 41)]
    assert one.tpot == pytest.approx(sum(steps) / 2)


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


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not beside the repository ({TRACES})")
def test_mooncake_prefixes_save_prefill_work() -> None:
    trace = TRACES / "mooncake" / "conversation_trace.head40min.jsonl.gz"
    arrivals = load_trace(trace, num_prompts=120, prompt_scale=8, output_scale=16)
    warm, cold = (
        simulate(arrivals, "kairos", "2x4", H200, options=Options(prefix_caching=caching)) for caching in (None, False)
    )
    assert warm.counters.prefix_hits > 0 == cold.counters.prefix_hits
    assert warm.counters.prompt_tokens + warm.counters.prefix_hits == cold.counters.prompt_tokens
    assert warm.summary.reasons == cold.summary.reasons == {"stop": 120}


def test_traces_are_rescaled_to_a_rate() -> None:
    arrivals = [Arrival(2.0 * n, 5, 2) for n in range(11)]
    slow, fast = simulate(arrivals, "distserve", "1x1", TINY), simulate(arrivals, "distserve", "1x1", TINY, qps=5)
    assert (slow.rate, fast.rate) == (0.5, 5)
    assert slow.ended == pytest.approx(20, abs=0.1) and fast.ended == pytest.approx(2, abs=0.1)


def test_bursts_lower_attainment() -> None:
    calm, bursty = (
        simulate(replace(CHAT, arrivals=Arrivals(kind, cv=4.0)), "distserve", "2x1", TINY, qps=60, num_requests=300)
        for kind in ("even", "gamma")  # type: ignore[arg-type]
    )
    assert bursty.summary.ttft.p99 > calm.summary.ttft.p99


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
    made = calls(lambda: reports.append(simulate(NAMED["K128"], "kairos", "2x4", H200, qps=3, num_requests=60)))
    assert reports[0].summary.count == 60 and made <= 1000 * reports[0].counters.steps


def test_the_command_never_imports_jax(tmp_path: Path) -> None:
    code = (
        "import sys; from jaxserve.cli.main import main; "
        f"flags = ['--qps', '3', '--num-requests', '20', '--out', {str(tmp_path)!r}, '--jobs', '1']; "
        "status = main(['simulate', *flags]); "
        "assert 'jax' not in sys.modules, 'jax was imported'; raise SystemExit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "SLO attainment" in done.stdout and "kairos" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "results.csv",
        "ttft.png",
        "tpot.png",
        "tbt.png",
    }
