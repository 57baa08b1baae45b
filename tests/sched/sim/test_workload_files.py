"""Workloads by name, and mixtures read strictly from YAML."""

from pathlib import Path

import pytest

from jaxserve.cli.simulate.workloads import find_workload
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.sim.arrival import validate
from jaxserve.sched.sim.scenarios import NAMED
from jaxserve.sched.sim.workload import K128, Mix, Slowdown, Workload

PRESETS = Path(__file__).resolve().parents[3] / "configs" / "workload"


@pytest.mark.parametrize("name", [*NAMED, *sorted(path.stem for path in PRESETS.glob("*.yaml"))])
def test_every_workload_is_found_and_can_be_served(name: str) -> None:
    workload = find_workload(name)
    assert workload.name == name
    validate(workload.draw(200, 3.0, 0))


def test_the_preset_k128_equals_the_built_in_one() -> None:
    assert find_workload("k128").draw(300, 3.0, 0) == K128.draw(300, 3.0, 0)


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


def test_a_file_without_parts_is_one_class(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text((PRESETS / "chat-bursty.yaml").read_text())
    assert isinstance(find_workload(str(path)), Workload)
