"""`jaxserve plan --qps`: the answer to a capacity question, and questions that are refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from jaxserve.cli.flags import TeachingParser, config_of
from jaxserve.cli.main import main
from jaxserve.cli.serve import add_arguments
from tests.support.capacity.sizes import SIZES

WORKLOAD = """
name: tiny
prompt: {kind: uniform, low: 10, high: 50}
output: {kind: uniform, low: 2, high: 5}
ttft: 100ms
tpot: 20ms
request-class: small
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "max_position_embeddings": 64}))
    (tmp_path / "tiny.yaml").write_text(WORKLOAD)
    return tmp_path


def plan(folder: Path, *words: str, qps: str = "50") -> int:
    command = ["plan", "--model", str(folder), "--devices", "l4:2", "--qps", qps]
    command += ["--workload", str(folder / "tiny.yaml")]
    return main([*command, "--num-requests", "64", "--jobs", "1", *words])


def test_an_answer_in_words_and_the_command_that_serves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = folder / "plan.yaml"
    assert plan(folder, "--price", "3", "--plot", str(folder / "plan.png"), "--manifest", str(written)) == 0
    out = capsys.readouterr().out
    for part in (
        "devices requests attained",
        "this keeps them: 1 device: 1x1 one instance",
        "answer: 1 device: 1x1 one instance",
        "by class: small 100.0%",
        "range: 1 device, with step times 1.25 times as short and as long",
        "headroom: it keeps them at",
        "cost: 3 an hour, ",
        "derived from data sheets: ASSUMED",
    ):
        assert part in out, part
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    command = next(line for line in out.splitlines() if line.startswith("serve it: jaxserve serve "))
    parser = TeachingParser()
    add_arguments(parser)
    config = config_of(parser.parse_args(shlex.split(command)[4:]))
    assert (config.mesh, config.max_model_len, config.policy) == ("1x1", 64, "unified")
    assert "&" not in written.read_text(), "no anchors"
    deployment, service = yaml.safe_load_all(written.read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    served = config_of(parser.parse_args(container["args"]))
    assert (served.mesh, served.max_model_len, served.host) == ("1x1", 64, "0.0.0.0")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"} and service["kind"] == "Service"


def test_a_search_that_is_stopped_early_blames_no_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.cli.plan.load.complete", stopped)
    assert plan(folder) == 130
    out = capsys.readouterr().out
    assert "no answer: stopped before" in out and "interrupted: " in out
    assert "memory: " not in out and "does not fit" not in out


def test_without_a_model_it_plans_for_the_demo_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload", str(folder / "tiny.yaml"), "--num-requests", "16", "--jobs", "1", "--json"]
    main(["plan", "--devices", "cpu:1", "--qps", "1", *words])
    assert "/jaxserve/demo/model --mesh 1x1 " in json.loads(capsys.readouterr().out)["serve"]


def test_sessions_are_told_from_requests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = "rounds: {mean: 2.0, std: 0.1, delay: 10ms, opening: {kind: fixed, value: 9}}\n"
    (folder / "tiny.yaml").write_text(WORKLOAD.replace("high: 50", "high: 15") + rounds)
    plan(folder, qps="20")
    out = capsys.readouterr().out
    first, second = out.splitlines()[:2]
    assert "devices sessions attained" in out and "simulated: 64 sessions a set-up" in out
    assert re.search(r"headroom: it keeps them at \d+ sessions/s", out)
    assert "20 sessions/s of tiny.yaml, about 40 requests/s" in first
    assert "2 ± 0.1 rounds a session, 9 tokens before the first prompt" in second


def test_what_is_short_if_nothing_keeps_the_objectives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, "--tpot-slo", "100us", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["keeps"] is False and found["best"] is None and found["nearest"] is None
    assert found["steps"][0]["best"] is None and found["steps"][0]["ceiling"] < 0.9
    assert plan(folder, "--tpot-slo", "100us") == 1
    assert "can keep their objectives on 1 device, whatever the policy" in capsys.readouterr().out


def test_a_model_that_does_not_fit_says_what_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, "--devices", "l4:1", "--kv-cache-memory", "1KiB") == 1
    out = capsys.readouterr().out
    assert "no answer: the model does not fit 1 device" in out and "memory: " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ttft-slo", "500"], "ttft_slo=500 s must be above 0 and at most 300 s.*500ms is 500 milliseconds"),
        (["--tpot-slo", "40"], "tpot_slo=40 s must be .* at most 5 s"),
        (["--ttft-slo", "0"], "ttft_slo=0 s must be above 0"),
        (["--devices", "b300:8"], "unknown device 'b300'; allowed: h200, h100"),
        (["--workload", "chatt"], "no workload preset 'chatt'"),
        (["--workload", "trace:none.csv", "--ttft-slo", "1s", "--tpot-slo", "40ms"], "none.csv"),
        (["--workload", "trace:{folder}/empty.csv", "--ttft-slo", "1s", "--tpot-slo", "40ms"], "empty.csv"),
        (["--workload", "trace:{folder}/empty.csv"], "a trace has no objectives: add --ttft-slo and --tpot-slo"),
        (["--qps", "0"], "qps=0 must be above 0"),
        (["--attainment", "90"], "attainment=90 must be a share"),
        (["--policies", "fastest"], "unknown policy 'fastest'"),
        (["--latency", "none"], "no latency preset 'none'"),
        (["--max-model-len", "20"], "exceed the model's 20 positions: no set-up keeps 90%; raise --max-model-len"),
        (["--compile"], "--compile is for a plan without --qps"),
    ],
)
def test_questions_that_are_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.csv").write_text("id,arrival_s,input_tokens,output_tokens\n")
    assert plan(folder, *[word.replace("{folder}", str(folder)) for word in words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_flags_of_a_load_need_a_rate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "--devices", "l4", "--ttft-slo", "1s"]) == 2
    assert "--ttft-slo needs --qps" in capsys.readouterr().err


def test_the_named_workloads_are_those_of_simulate_and_bench(folder: Path) -> None:
    from jaxserve.cli.simulate.workloads import find_workload

    for name in ("interactive-chat", "code-generation", "reasoning", "deep-research", "batch", "agents"):
        found = find_workload(name)
        drawn = found.draw(50, 1.0, 0)
        assert found.name == name and len(drawn) >= 50 and all(one.slo.ttft < 60 for one in drawn)
