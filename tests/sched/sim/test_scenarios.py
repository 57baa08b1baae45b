"""The papers' workloads match the papers: lengths, shares, SLOs, rounds and bursts; workloads from YAML."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxserve.cli.simulate.workloads import find_workload
from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.sim import Latency
from jaxserve.sched.sim.arrival import Arrival, validate
from jaxserve.sched.sim.scenarios import CODER, NAMED, TIGHT, TOOLLLM, flowprefill
from jaxserve.sched.sim.workload import K128, Mix, Slowdown, Workload
from jaxserve.yamlio import load_yaml

COUNT = 25_000


@cache
def drawn(name: str) -> tuple[Arrival, ...]:
    return tuple(NAMED[name].draw(COUNT, 4.0, 5))


def of_class(name: str, kind: str) -> list[Arrival]:
    return [arrival for arrival in drawn(name) if arrival.class_ == kind]


def check(lengths: Iterable[int], mean: float, std: float, p99: float, *, within: float) -> None:
    """Check mean and deviation within 5%, and the percentile within `within`."""
    values = np.array(list(lengths), dtype=float)
    assert values.mean() == pytest.approx(mean, rel=0.04)
    assert values.std() == pytest.approx(std, rel=0.06)
    assert np.percentile(values, 99) == pytest.approx(p99, rel=within)


# FlowPrefill, Table 1.
@pytest.mark.parametrize(
    ("task", "mean", "p99", "std", "percent", "within"),
    [
        ("text", 590, 3040, 652, 68, 0.05),
        ("image", 532, 2764, 510, 8, 0.14),
        ("search", 5976, 16635, 3456, 20, 0.08),
        ("file", 6833, 22390, 5186, 4, 0.16),
    ],
)
def test_flowprefill_lengths(task: str, mean: float, p99: float, std: float, percent: float, within: float) -> None:
    assert 100 * len(of_class("flowprefill-llama3-8b", task)) / COUNT == pytest.approx(percent, abs=0.9)
    [alone] = [part.workload for part in flowprefill("llama3-8b").parts if part.workload.name == task]
    check((a.prompt_tokens for a in alone.draw(COUNT, 1.0, 5)), mean, std, p99, within=within)


# FlowPrefill, Table 2, and section 6.5 for prefill and decode on one device.
@pytest.mark.parametrize(
    ("model", "ttfts"),
    [
        ("llama3-8b", (0.25, 0.5, 4.0, 6.0)),
        ("qwen2.5-14b", (0.4, 0.8, 6.5, 9.0)),
        ("llama3-70b", (1.0, 2.0, 15.0, 18.0)),
    ],
)
def test_flowprefill_slos(model: str, ttfts: tuple[float, ...]) -> None:
    arrivals = NAMED[f"flowprefill-{model}"].draw(500, 4.0, 0)
    assert {a.class_: a.slo.ttft for a in arrivals} == dict(
        zip(("text", "image", "search", "file"), ttfts, strict=True)
    )
    half = flowprefill(model, 0.5).draw(500, 4.0, 0)
    assert [a.slo.ttft for a in half] == [a.slo.ttft / 2 for a in arrivals]
    together = flowprefill(model, colocated=True).draw(500, 4.0, 0)
    assert {a.class_: (a.slo.ttft, a.slo.tbt) for a in together} == {
        "text": (3 * ttfts[0], 0.1),
        "image": (3 * ttfts[1], 0.1),
        "search": (3 * ttfts[2], 0.2),
        "file": (3 * ttfts[3], 0.2),
    }


# SLOs-Serve, Table 4.
@pytest.mark.parametrize(
    ("scenario", "prompt", "output"),
    [
        ("chatbot", (763, 1591, 424, 0.03), (266, 619, 160, 0.03)),
        ("coder", (847, 2010, 617, 0.03), (26, 232, 47, 0.12)),
        ("summarizer", (1333, 1946, 444, 0.03), (202, 1508, 234, 0.05)),
        ("reasoning", (127, 421, 83, 0.05), (803, 1650, 280, 0.05)),
    ],
)
def test_slos_serve_lengths(scenario: str, prompt: tuple[float, ...], output: tuple[float, ...]) -> None:
    arrivals = drawn(f"slos-serve-{scenario}")
    for lengths, (mean, p99, std, within) in (
        ((a.prompt_tokens for a in arrivals), prompt),
        ((a.output_tokens - a.thinking_tokens for a in arrivals), output),
    ):
        check(lengths, mean, std, p99, within=within)


def test_reasoning_thinks_first_with_a_tighter_tpot() -> None:
    arrivals = drawn("slos-serve-reasoning")
    check((a.thinking_tokens for a in arrivals), 4693, 1442, 7297, within=0.03)
    assert {(a.slo.tpot_of("thinking"), a.slo.tpot_of("answer")) for a in arrivals} == {(0.05, 0.1)}


# SLOs-Serve, Tables 1 and 3: TTFT three or five times that of an idle server, TPOT of 50 or 100 ms.
@pytest.mark.parametrize(
    ("scenario", "times", "tpot"), [("chatbot", 5, 0.1), ("coder", 5, 0.05), ("summarizer", 3, 0.1)]
)
def test_slos_serve_objectives(scenario: str, times: float, tpot: float) -> None:
    for arrival in drawn(f"slos-serve-{scenario}")[:100]:
        assert arrival.slo.ttft == pytest.approx(times * (0.012 + 72e-6 * arrival.prompt_tokens))
        assert arrival.slo.tpot == tpot


def test_the_idle_server_is_the_preset() -> None:
    coefficients = load_yaml(preset("latency", "opt-7b-a100-40g"), Latency).solve()
    measured = TIGHT.measured(lambda tokens: coefficients.step_time(Load().add_chunk(tokens, 0)))
    assert measured.fixed == pytest.approx(TIGHT.fixed, rel=0.02)
    assert measured.per_token == pytest.approx(TIGHT.per_token, rel=0.02)


def test_mixed_combines_three_scenarios_with_their_objectives() -> None:
    arrivals = drawn("slos-serve-mixed")
    shares = {kind: len(of_class("slos-serve-mixed", kind)) / COUNT for kind in ("chatbot", "coder", "summarizer")}
    assert shares == pytest.approx(dict.fromkeys(shares, 1 / 3), abs=0.03)
    assert {(a.class_, a.slo.tpot) for a in arrivals} == {("chatbot", 0.1), ("coder", 0.05), ("summarizer", 0.1)}


def test_a_quarter_of_the_load_is_best_effort() -> None:
    arrivals = drawn("slos-serve-mixed-best-effort")
    lowered = [a for a in arrivals if a.tier == BEST_EFFORT]
    assert len(lowered) / COUNT == pytest.approx(0.25, abs=0.02)
    assert {(a.class_, a.slo) for a in lowered} == {("batch", SLO(float("inf"), float("inf")))}


def test_toolllm_rounds_share_the_conversation() -> None:
    arrivals = TOOLLLM.draw(20_000, 2.0, 1)
    chains: list[list[Arrival]] = []
    for place, arrival in enumerate(arrivals):
        if arrival.after is None:
            chains.append([])
        else:
            assert arrival.after == place - 1
        chains[-1].append(arrival)
    rounds = np.array([len(chain) for chain in chains])
    assert len(chains) == 20_000 and rounds.min() == 1
    assert rounds.mean() == pytest.approx(2.7, abs=0.08) and rounds.std() == pytest.approx(1.1, abs=0.08)
    fresh = [c[0].prompt_tokens for c in chains]
    check(fresh, 690, 356, 2131, within=0.14)
    check((a.output_tokens for a in arrivals), 116, 66, 363, within=0.08)
    for chain in chains[:300]:
        for earlier, later in pairwise(chain):
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
            assert later.prompt(1)[: earlier.prompt_tokens] == earlier.prompt(0)[:]
            assert later.time == earlier.time and later.delay > 0
            assert earlier.slo.tpot == 0.05
        assert chain[-1].slo.tpot == 0.1 and chain[0].delay == 0
    firsts = {a.prompt(place)[0] for place, a in enumerate(arrivals)}
    assert len(firsts) == len(chains)  # only rounds of one request share a beginning


# Azure 2023 code, 38 minutes: variance over mean of the counts in windows.
def test_coder_is_as_bursty_as_its_trace() -> None:
    for window, published, within in ((1, 13.1, 0.3), (10, 70.6, 0.25), (60, 159, 0.25)):
        found = []
        for seed in range(4):
            times = [a.time for a in CODER.draw(10_000, 3.076, seed)]
            counts = np.histogram(times, np.arange(0, times[-1], window))[0]
            found.append(counts.var() / counts.mean())
        assert np.mean(found) == pytest.approx(published, rel=within)


# FairBatching, Table 2: mean and 90th percentile.
@pytest.mark.parametrize(
    ("trace", "prompt", "output", "ttft"),
    [
        ("burstgpt", (688, 1599), (237, 470), 0.5),
        ("qwen", (892, 1776), (377, 742), 0.5),
        ("azure", (1604, 3561), (114, 392), 2.0),
    ],
)
def test_fairbatching_traces(trace: str, prompt: tuple[float, float], output: tuple[float, float], ttft: float) -> None:
    arrivals = drawn(f"fairbatching-{trace}")
    assert {a.slo for a in arrivals} == {SLO(ttft, 0.05)}
    for lengths, (mean, p90) in (
        ([a.prompt_tokens for a in arrivals], prompt),
        ([a.output_tokens for a in arrivals], output),
    ):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.03)
        assert np.percentile(lengths, 90) == pytest.approx(p90, rel=0.06)


def test_deflection_bursts() -> None:
    times = np.array([a.time for a in drawn("deflection")])
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() > 1.8  # Poisson has 1
    assert {(a.slo.ttft, a.slo.tbt) for a in drawn("deflection")} == {(2.0, 0.1)}


@pytest.mark.parametrize("name", NAMED)
def test_one_slo_can_replace_all(name: str) -> None:
    workload = NAMED[name]
    assert isinstance(workload, Workload | Mix)
    promised = {a.slo.ttft for a in replace(workload, ttft=1.5).draw(200, 4.0, 0) if a.tier != BEST_EFFORT}
    assert promised == {1.5}


PRESETS = Path(__file__).resolve().parents[3] / "configs" / "workload"


@pytest.mark.parametrize("name", [*NAMED, *sorted(path.stem for path in PRESETS.glob("*.yaml"))])
def test_every_workload_is_found_and_can_be_served_at_the_requested_rate(name: str) -> None:
    workload = find_workload(name)
    assert workload.name == name
    arrivals = workload.draw(3000, 4.0, 2)
    validate(arrivals)
    requests = sum(a.after is None for a in arrivals)
    assert requests == 3000
    assert requests / arrivals[-1].time == pytest.approx(4.0, rel=0.15)


def test_a_preset_equals_the_built_in_workload_or_is_one_class() -> None:
    assert find_workload("k128").draw(300, 3.0, 0) == K128.draw(300, 3.0, 0)
    assert isinstance(find_workload("chat-bursty"), Workload)


def test_a_mixture_from_yaml_has_every_kind_of_request() -> None:
    mix = find_workload("agents-and-chat")
    assert isinstance(mix, Mix)
    arrivals = mix.draw(5000, 5.0, 0)
    firsts = [a for a in arrivals if a.after is None]
    shares = {part.workload.request_class: part.share / 10 for part in mix.parts}
    assert {k: sum(a.class_ == k for a in firsts) / 5000 for k in shares} == pytest.approx(shares, abs=0.03)
    agents = [a for a in arrivals if a.class_ == "agent"]
    assert len(agents) / sum(a.after is None for a in agents) == pytest.approx(4.0, abs=0.15)
    assert {a.tier for a in arrivals if a.class_ == "batch"} == {BEST_EFFORT}
    assert all(0 < a.thinking_tokens < a.output_tokens for a in arrivals if a.class_ == "reasoner")
    [agent] = [part.workload for part in mix.parts if part.workload.name == "agent"]
    assert isinstance(agent.ttft, Slowdown) and agent.ttft.ttft(1000) == pytest.approx(5 * 0.06)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  - share: 6", "  - share: 0", r"w\.yaml:\d+: share=0.0 of chat must be positive"),
        ("ttft: 1s", "ttft: 0s", r"w\.yaml:\d+: SLO ttft=0.0 must be a positive"),
        ("tier: best_effort", "tier: gold", r"w\.yaml:\d+: tier='gold'"),
        ("cv: 2.0", "cvv: 2.0", r"w\.yaml:\d+: unknown key 'cvv'"),
        ("mean: 4.0, std: 1.5", "mean: 0.0, std: 1.5", r"w\.yaml:\d+: rounds mean=0.0 must be at least 1"),
        ("kind: beta, mean: 3000", "kind: beta, mean: 9000", r"do not fit between 1 and 8000"),
    ],
)
def test_an_invalid_mixture_is_refused_with_its_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (PRESETS / "agents-and-chat.yaml").read_text()
    assert old in text
    path = tmp_path / "w.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidValue, match=message):
        find_workload(str(path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="did you mean 'slos-serve-chatbot'"):
        find_workload("slos-serve-chatbots")
    with pytest.raises(InvalidValue, match=r"nothing\.yaml does not exist"):
        find_workload(str(tmp_path / "nothing.yaml"))
