"""`jaxserve simulate`: flags and output."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.simulate import command, plots
from jaxserve.cli.simulate.command import _read_workload, add_arguments, parse_policies, parse_rates, processes
from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.perf import Load
from jaxserve.sched.sim import Arrival, Latency, sweep
from jaxserve.yamlio import load_yaml
from tests.support.sched.presets import CHAT, ROOT, TINY

RATES = ([20, 40], [30], [20, 30, 40])  # worker processes are kept from one sweep to the next
TRACE = "id,arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{n},{n / 4},{100 * n + 1},{n % 5 + 1}\n" for n in range(20)
)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plots, which take a second each."""
    monkeypatch.setattr(plots, "draw", lambda out, results: [])


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("3", [3.0]),
        ("2,3.5", [2.0, 3.5]),
        ("2:3:0.5", [2.0, 2.5, 3.0]),
        ("2.0:5.0:0.2", [2 + i / 5 for i in range(16)]),
    ],
)
def test_rates_are_parsed(text: str, rates: list[float]) -> None:
    assert parse_rates(text) == pytest.approx(rates)


def test_ctrl_c_keeps_the_simulations_that_have_ended(
    no_plots: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def interrupted(jobs: int | None, tell: Any) -> Iterator[Any]:
        def run(cell: Any, cases: Any) -> Iterator[Any]:
            with processes(1) as inner:
                for number, report in enumerate(inner(cell, cases)):
                    if number == 3:
                        raise KeyboardInterrupt
                    yield report

        yield run

    monkeypatch.setattr(command, "processes", interrupted)
    flags = "--workload slos-serve-chatbot --policy vllm,kairos --qps 2,4 --num-requests 20 --seeds 2"
    assert main(["simulate", *flags.split(), "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr()
    assert len(re.findall(r"at \d/s, seed \d: \d\.\d{3}", shown.err)) == 3
    assert "vllm" in shown.out
    with (tmp_path / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("here")
    for flag in ("--out", "--timeline"):
        flags = ["--workload", "slos-serve-chatbot", "--policy", "vllm", "--qps", "2", "--seeds", "1"]
        assert main(["simulate", *flags, flag, str(tmp_path / "file" / "x")]) == 2
        shown = capsys.readouterr()
        assert "cannot be written" in shown.err and not shown.out


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "3:2:1", "1:2:0", "1:2", "1,,2", "inf", "nan"])
def test_invalid_rates_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be positive rates, as in 3, 2,3,4 or 2\.0:5\.0:0\.2"):
        parse_rates(text)


def test_policy_options_may_contain_commas() -> None:
    text = "distserve,prefill=kairos,decode=continuous,kairos,kairos"
    assert parse_policies(text) == ["distserve", "prefill=kairos,decode=continuous", "kairos"]
    with pytest.raises(InvalidValue, match="at least one"):
        parse_policies(" , ")


def test_a_slowdown_is_relative_to_the_papers_or_the_simulated_devices() -> None:
    parser, latency = argparse.ArgumentParser(), load_yaml(preset("latency", "minimax-m2.5-h200-tp4"), Latency)
    add_arguments(parser)

    def first(*flags: str) -> Arrival:
        args = parser.parse_args(["--workload", "slos-serve-chatbot", "--qps", "1", *flags])
        workload = _read_workload(args, latency)
        assert not isinstance(workload, list)
        return workload.draw(1, 1.0, 0)[0]

    theirs, own = first(), first("--own-slowdown")
    alone = latency.solve().step_time(Load().add_chunk(own.prompt_tokens, 0))
    assert theirs.slo.ttft == pytest.approx(5 * (0.012 + 72e-6 * theirs.prompt_tokens))
    assert own.slo.ttft == pytest.approx(5 * alone, rel=0.05) != theirs.slo.ttft


def test_progress_counts_the_requests_of_running_simulations(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []
    with processes(1, seen.append) as run:
        sweep(CHAT, ["kairos"], "2x1", TINY, rates=[20, 40], num_requests=20, run=run)
    assert seen == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_several_processes_give_the_same_results_as_one() -> None:
    def go(jobs: int) -> str:  # as text, since NaN differs from itself
        with processes(jobs) as run:
            reports = [sweep(CHAT, ["kairos"], "2x1", TINY, rates=rates, num_requests=15, run=run) for rates in RATES]
        return repr(reports)

    assert go(1) == go(2)


def test_a_trace_at_two_rates_writes_table_json_csv_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv.gz"
    trace.write_bytes(gzip.compress(TRACE.encode()))
    out = tmp_path / "out"
    words = ["--workload", f"trace:{trace}", "--qps", "2,4", "--ttft-slo", "100ms", "--out", str(out), "--jobs", "1"]
    three = ("distserve", "kairos", "unified")
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "of 20 requests" in printed and "goodput of kairos: " in printed
    document = json.loads((out / "results.json").read_text())
    assert [(one["policy"], one["qps"]) for one in document["results"]] == [
        (policy, rate) for policy in three for rate in (2.0, 4.0)
    ]
    assert document["settings"]["ttft_slo"] == 0.1 and document["settings"]["coefficients"]["w_moe"] == 0.0115
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert len(rows) == 6 and float(rows[0]["attained"]) == pytest.approx(document["results"][0]["attained"], rel=1e-5)
    assert {path.name for path in out.iterdir()} == {
        *("results.json", "results.csv", "attainment.png", "by-length.png", "goodput.png"),
        *("ttft.png", "tpot.png", "tbt.png"),
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))


@pytest.mark.usefixtures("no_plots")
def test_a_search_finds_goodput_below_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    what = "--workload K32 --goodput --bound --qps 4 --num-requests 30 --ttft-slo 1s --tolerance 0.3"
    words = [*what.split(), "--out", str(tmp_path)]
    assert main(["simulate", "--policy", "distserve", "--jobs", "1", *words]) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "results.json").read_text())
    rate = document["goodput"]["distserve"]
    assert document["goal"] == {"share": 0.9, "of": "both", "searched": True}
    assert f"goodput of distserve: {rate:.3g} requests/s" in printed
    assert rate < document["goodput_bound"] and "no policy reaches 90%" in printed
    shares = {one["qps"]: one["attained"] for one in document["results"]}
    assert shares[rate] >= 0.9 > max(share for other, share in shares.items() if other > rate)
    limits = {one["qps"]: one["attained"] / one["requests"] for one in document["bounds"]}
    assert limits.keys() == shares.keys() and all(shares[each] <= limits[each] for each in shares)
    assert sum(line.startswith("bound,") for line in (tmp_path / "results.csv").read_text().splitlines()) == len(limits)


def test_a_timeline_and_a_life_of_one_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE.replace("\n7,", "\nseven,"))
    for suffix, asked in ((".json", "seven"), (".json.gz", "19")):
        file = tmp_path / f"steps{suffix}"
        words = ["--workload", f"trace:{trace}", "--policy", "kairos", "--timeline", str(file), "--explain", asked]
        assert main(["simulate", *words]) == 0
        printed = capsys.readouterr().out
        number = 7 if asked == "seven" else 19
        assert f"Request {number} ({'seven' if number == 7 else 19}): {100 * number + 1:,} prompt tokens" in printed
        data = file.read_bytes()
        events = json.loads(gzip.decompress(data) if suffix.endswith("gz") else data)["traceEvents"]
        assert {one["ph"] for one in events} >= set("MXCstf")
    assert main(["simulate", "--workload", f"trace:{trace}", "--policy", "kairos", "--explain", "missed"]) == 0
    assert "no request missed its SLO" in capsys.readouterr().out


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("named", [[7, 8], []])
def test_prefix_hits_are_reported_only_if_there_are_any(
    named: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Return three prompts a minute apart that share the first two of four blocks, or nothing."""
    trace = tmp_path / "trace.jsonl"
    own = {n: range(10 * n, 10 * n + 4) for n in (1, 2, 3)}
    lines = [
        {"timestamp": 60_000 * n, "input_length": 2048, "output_length": 2, "hash_ids": [*named, *own[n]][:4]}
        for n in (1, 2, 3)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for count in (1, 2, 3):
        words = ["--workload", f"trace:{trace}", "--policy", "kairos", "--num-requests", str(count)]
        assert main(["simulate", *words, "--out", str(tmp_path)]) == 0
        found = json.loads((tmp_path / "results.json").read_text())["results"][0]["prefix_hit_rate"]
        assert found == pytest.approx(0.5 * (count - 1) / count if named else 0.0)
        assert ("cached" in capsys.readouterr().out) is (found > 0)


@pytest.mark.usefixtures("no_plots")
def test_flags_reach_the_simulation(tmp_path: Path) -> None:
    """Each flag changes the results in the expected direction."""

    def ttft(*words: str) -> float:
        flags = ["--policy", "distserve", "--qps", "4", "--num-requests", "10", "--jobs", "1", "--out", str(tmp_path)]
        assert main(["simulate", *flags, *words]) == 0
        result = json.loads((tmp_path / "results.json").read_text())["results"][0]
        return float(result["ttft"]["mean"])

    plain = ttft()
    assert ttft("--routing-delay", "500ms") == pytest.approx(plain + 0.5, rel=0.05)
    assert ttft("--coefficient", "w_moe=0.1") != plain
    assert ttft("--no-pack") != plain
    assert ttft("--max-num-batched-tokens", "512") > plain
    assert ttft("--noise", "0.5") != plain
    assert ttft("--fronts", "3", "--stale-state", "2s", "--mode", "colocated") != ttft("--mode", "colocated")
    assert ttft("--first-token", "decode") > plain


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize(
    ("attain", "share"), [("ttft", "ttft_attained"), ("worst", "worst_attained"), ("tokens", "token_weighted")]
)
def test_goodput_accepts_other_goals(attain: str, share: str, tmp_path: Path) -> None:
    words = ["--policy", "kairos", "--qps", "1,6", "--num-requests", "15", "--goal", "0.8", "--out", str(tmp_path)]
    assert main(["simulate", "--jobs", "1", "--attain", attain, *words]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    rates = [one["qps"] for one in document["results"] if one[share] >= 0.8]
    assert document["goodput"]["kairos"] == max(rates, default=None)


@pytest.mark.usefixtures("no_plots")
def test_the_mesh_has_as_many_devices_as_the_latency_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--latency", "qwen3-32b-h20-tp2", "--policy", "kairos", "--qps", "1", "--num-requests", "5"]
    assert main(["simulate", "--jobs", "1", *words, "--out", str(tmp_path)]) == 0
    assert "K128 on 2x2 of qwen3-32b-h20-tp2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--qps", "3", "--workload", "k12"], "did you mean 'k128'"),
        (["--workload", "K128"], "needs a rate"),
        (["--qps", "3", "--workload", "trace:nowhere.csv"], "nowhere.csv does not exist"),
        (["--qps", "3", "--latency", "none"], "minimax-m2.5-h200-tp4"),
        (["--qps", "3", "--mesh", "2x2"], "2 devices per instance"),
        (["--qps", "3", "--seeds", "0"], "seeds=0"),
        (["--qps", "3", "--jobs", "0"], "jobs=0"),
        (["--qps", "3", "--policy", "kairoz"], "unknown policy 'kairoz'"),
        (["--qps", "3", "--routing", "least_wrk"], "did you mean 'least_work'"),
        (["--qps", "3", "--admission", "all"], "unknown admission 'all'"),
        (["--qps", "3", "--preempt-boundary", "half"], "must be op, layer, layers:K or chunk"),
        (["--qps", "3", "--coefficient", "context=fast"], "must be NAME=SECONDS"),
        (["--qps", "3", "--coefficient", "speed=1"], "coefficient 'speed' must be one of"),
        (["--qps", "3", "--kv-scale", "0"], "kv_scale=0.0 must be more than 0"),
        (["--qps", "3", "--prediction-error", "-1"], "prediction_error=-1.0"),
        (["--qps", "3", "--explain", "5"], "this is 3 simulations"),
        (["--goodput", "--policy", "kairos", "--timeline", "x.json"], "this is a search"),
        (["--goodput", "--goal", "2"], "goal=2.0"),
        (["--qps", "3", "--num-requests", "5", "--policy", "kairos", "--explain", "5"], "0 to 4"),
    ],
)
def test_errors_are_one_line_with_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    lines = [line for line in told if not line.startswith("simulating ")]  # told if it takes longer than a moment
    assert len(lines) == 1 and message in lines[0]


def test_the_example_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guide" / "simulator.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    exec(compile(example, "docs/guide/simulator.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == ["kairos", "LongestFirst"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--skip", "5"), "skip=5 at each end leaves none of the 10 requests"),
        (("--horizon", "1us"), "horizon=1e-06 and skip=0 leave no request: 0 of 10 had arrived"),
    ],
)
def test_a_simulation_that_counts_no_request_is_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--policy", "distserve", "--qps", "1", "--num-requests", "10", *flags]) == 2
    assert says in capsys.readouterr().err
