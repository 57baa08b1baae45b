"""`jaxserve simulate`: what a person types, and what is written for them."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from jaxserve.__main__ import main
from jaxserve.errors import InvalidValue
from jaxserve.sched.sim import sweep
from jaxserve.simulate import parse_policies, parse_rates, processes

from .test_sim import CHAT, TINY

TRACE = "id,arrival_s,input_tokens,output_tokens\n" + "".join(
    f"{n},{n / 4},{100 * n + 1},{n % 5 + 1}\n" for n in range(20)
)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("3", [3.0]),
        ("2,3.5", [2.0, 3.5]),
        ("2:3:0.5", [2.0, 2.5, 3.0]),
        ("2.0:5.0:0.2", [2 + i / 5 for i in range(16)]),
    ],
)
def test_rates(text: str, rates: list[float]) -> None:
    assert parse_rates(text) == pytest.approx(rates)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "3:2:1", "1:2:0", "1:2", "1,,2", "inf", "nan"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"must be as 3, 2,3,4 or 2\.0:5\.0:0\.2"):
        parse_rates(text)


def test_policies_with_a_comma_of_their_own() -> None:
    text = "distserve,prefill=kairos,decode=continuous,kairos,kairos"
    assert parse_policies(text) == ["distserve", "prefill=kairos,decode=continuous", "kairos"]
    with pytest.raises(InvalidValue, match="at least one"):
        parse_policies(" , ")


def test_processes_give_what_one_gives() -> None:
    def go(jobs: int) -> str:  # as text: what is NaN differs from itself
        return repr(sweep(CHAT, ["kairos"], "2x1", TINY, rates=[20, 40], num_requests=15, run=processes(jobs)))

    assert go(1) == go(2)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_trace_at_two_rates_writes_table_json_csv_and_curves(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / f"trace.csv{suffix}"
    trace.write_bytes(gzip.compress(TRACE.encode()) if suffix else TRACE.encode())
    out = tmp_path / "out"
    words = ["--workload", f"trace:{trace}", "--qps", "2,4", "--ttft-slo", "100ms", "--out", str(out), "--jobs", "1"]
    assert main(["simulate", *words]) == 0
    printed = capsys.readouterr().out
    assert "of 20 requests" in printed and "goodput of kairos: " in printed
    document = json.loads((out / "results.json").read_text())
    assert [(one["policy"], one["qps"]) for one in document["results"]] == [
        (policy, rate) for policy in ("distserve", "kairos") for rate in (2.0, 4.0)
    ]
    assert document["settings"]["ttft_slo"] == 0.1 and document["settings"]["coefficients"]["w_moe"] == 0.0115
    rows = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert len(rows) == 4 and float(rows[0]["attained"]) == pytest.approx(document["results"][0]["attained"], rel=1e-5)
    assert {path.name for path in out.iterdir()} == {"results.json", "results.csv", "attainment.png", "by-length.png"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--qps", "3", "--workload", "k12"], "did you mean 'k128'"),
        (["--workload", "K128"], "needs a rate"),
        (["--qps", "3", "--workload", "trace:nowhere.csv"], "nowhere.csv does not exist"),
        (["--qps", "3", "--latency", "none"], "minimax-m2.5-h200-tp4"),
        (["--qps", "3", "--mesh", "2x2"], "2 devices an instance"),
        (["--qps", "3", "--seeds", "0"], "seeds=0"),
        (["--qps", "3", "--jobs", "0"], "jobs=0"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    assert "jaxserve simulate --policy distserve,kairos --qps 2.0:5.0:0.2" in capsys.readouterr().out
