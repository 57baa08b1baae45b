"""The scripts in benchmarks/ start, and those that need no server run."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve.report.table import markdown

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - {"common"})


def run(repo: Path, script: str, *flags: str, timeout: float = 120) -> str:
    command = [sys.executable, "-W", "error", f"benchmarks/{script}.py", *flags]
    done = subprocess.run(command, cwd=repo, env={**os.environ}, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(repo: Path, folder: Path, script: str, flags: str, timeout: float = 600) -> tuple[str, dict[str, Any]]:
    """Run a script; return what it says, and what it writes."""
    path = folder / "results.json"
    said = run(repo, script, *flags.split(), "--output", str(path), timeout=timeout)
    return said, json.loads(path.read_text())


HELPS = """
import contextlib, io, json, runpy, sys
sys.path.insert(0, "benchmarks")
found = {}
for script in sys.argv[1:]:
    sys.argv, said = [f"benchmarks/{script}.py", "--help"], io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            found[script] = [end.code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps(repo: Path) -> dict[str, tuple[int, str]]:
    """Return each script's --help output and exit status, all from one process."""
    command = [sys.executable, "-W", "error", "-c", HELPS, *SCRIPTS]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(helps: dict[str, tuple[int, str]], script: str) -> None:
    status, said = helps[script]
    assert status == 0 and "--output" in said


def test_overload(repo: Path, tmp_path: Path) -> None:
    """A long queue costs no throughput; the script compares times, which need a quiet machine."""
    flags = "--policies unified kairos --rows 8 --waiting 50 2000 --steps 30"
    _, found = results(repo, tmp_path, "overload", flags, timeout=120)
    assert found["least_share"] >= 0.95 and len(found["rows"]) == 4


def test_scheduler_cost(repo: Path, tmp_path: Path) -> None:
    flags = "--policies distserve --sizes 8+16 --steps 20 --fleet 4x8 --program 4+8 --note test"
    said, found = results(repo, tmp_path, "scheduler_cost", flags, timeout=120)
    assert "distserve" in said
    assert {"commit", "device", "jax", "date", "note", "load_average"} <= set(found)
    (row,) = found["rows"]
    assert 0 < row["median_decide_ms"] <= row["median_plan_ms"] <= row["p99_plan_ms"]
    assert row["decoding_in_last_view"] > 0
    assert {"deflect", "unified"} <= {row["routing"] for row in found["routers"]}
    assert found["program"][0]["admitted"] > 0


def test_simulation_cost(repo: Path, tmp_path: Path) -> None:
    flags = "--policies distserve --requests 20"
    rows = results(repo, tmp_path, "simulation_cost", flags, timeout=120)[1]["rows"]
    assert [row["mesh"] for row in rows] == ["1P1D", "2 mixed"]
    assert all(row["policy"] == "distserve" and row["steps"] > 0 < row["cpu_s"] for row in rows)


def test_slos_serve_tables(repo: Path, tmp_path: Path) -> None:
    """The page shows the newest results in one table each; a table printed only leaves page and results unchanged."""
    page = repo / "docs" / "research" / "slos_serve.md"
    before, path = page.read_text(), tmp_path / "found.json"
    helps = run(repo, "reproduce/slos_serve", "--help")
    newest = sorted((repo / "benchmarks" / "results").glob("slos_serve-*.json"))[-1]
    made = json.loads(newest.read_text())["made"]
    assert newest.name in before and sorted(made) == sorted(re.findall(r"<!-- table: (\w+) -->", before))
    for name, one in made.items():
        assert name in helps
        assert f"<!-- table: {name} -->\n{markdown(one['columns'], one['rows'])}\n<!-- end -->" in before, name
    printed = run(repo, "reproduce/slos_serve", "traces", "--print-only", "--output", str(path))
    assert "conversation" in printed and "dispersion" in printed
    assert page.read_text() == before and not path.exists()


def tables_of(page: str) -> dict[str, str]:
    """Return the tables that a page marks as written by a script, by name."""
    return dict(re.findall(r"<!-- table: (.*?) -->\n(.*?)<!-- end -->", page, re.DOTALL))


@pytest.mark.full
def test_served_policies_resumes_and_writes_the_page(repo: Path, tmp_path: Path) -> None:
    """Serve two cases; a second run finds their results, serves nothing, and writes the tables into the page."""
    path, page = tmp_path / "served.json", tmp_path / "served.md"
    before = (repo / "docs" / "research" / "served.md").read_text()
    page.write_text(before)
    flags = "--models demo --mixes tasks --requests 4 --mesh 1x1 --profile-time 2 --output"
    command = ["served_policies", *flags.split(), str(path), "--policies", "sarathi unified"]
    assert "demo tasks unified: " in run(repo, *command, timeout=600)
    found = json.loads(path.read_text())
    assert found["scales"]["demo"]["parameters"] > 1e6
    for case in found["cases"]:
        served, again = case["served"], case["simulated"]
        assert served["failed"] == 0 < served["seconds"] and set(served["classes"]) == set(again["classes"])
        assert set(served["classes"]) == {"batch", "chat", "code", "summary"}
        assert 0 <= served["attained"] <= 1 and 0 <= again["attained"] <= 1
        assert case["steps"]["decode"]["mape"] >= 0 and case["first_tokens"]["requests"] > 0
        counts = case["counts"]
        assert counts["steps"] > 20 and counts["compiled_while_serving"] == counts["replay_differences"] == 0
    assert "demo tasks" not in run(repo, *command, "--page", str(page))
    written, kept = tables_of(page.read_text()), tables_of(before)
    changed = {name for name in written if written[name] != kept[name]}
    assert changed == {"demo tasks load", "demo tasks", "demo predicted"} and written.keys() == kept.keys()
    assert written["demo tasks"].count("| unified | split | ") == written["demo predicted"].count("| unified | ") == 1
    assert json.loads(path.read_text())["cases"] == found["cases"]


@pytest.mark.full
def test_compare(repo: Path, tmp_path: Path) -> None:
    flags = "--sides transformers continuous --models demo --requests 1 2 --prompt 16 --tokens 4 --prompts 16 24"
    said, made = results(repo, tmp_path, "compare", f"{flags} --repeats 1", timeout=120)
    assert "transformers over continuous" in said and "different first tokens" not in said
    (found,) = made["models"]
    assert [(row["side"], row["requests"]) for row in found["decode"]] == [
        (side, requests) for requests in (1, 2) for side in ("transformers", "continuous")
    ]
    for row in found["decode"]:
        assert row["tokens_per_s"] == pytest.approx(row["requests"] * 4 / row["seconds"][0])
    assert [row["prompt"] for row in found["prefill"]] == [16, 16, 24, 24]
    assert min(found["memory"].values()) > 1e8


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--server llamacpp=llama-server", "can only be compared as a server: add --http"),
        ("--http --server vllm=llama-server", "must be SIDE=FILE with a side of llamacpp"),
        ("--http --server llamacpp", "must be SIDE=FILE"),
    ],
)
def test_compare_refuses_an_unusable_server(repo: Path, flags: str, why: str) -> None:
    command = [sys.executable, "benchmarks/compare.py", *flags.split()]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and why in done.stderr


def test_a_mode_has_a_result_of_its_own_unless_a_file_is_named(load_file: Callable[[str], ModuleType]) -> None:
    common, parser = load_file("benchmarks/common.py"), argparse.ArgumentParser()
    common.add_output(parser, "plain")
    default, given = parser.parse_args([]), parser.parse_args(["--output", "mine.json"])
    for args in (default, given):
        common.name_output(parser, args, "mode")
    assert re.fullmatch(r"mode-\d{4}-\d\d-\d\d\.json", default.output.name)
    assert default.output.parent == parser.get_default("output").parent and given.output == Path("mine.json")


@pytest.mark.full
def test_failover(repo: Path, tmp_path: Path) -> None:
    """Kill an engine twice; the script exits with 1, and run() fails, if a stream differs."""
    _, found = results(repo, tmp_path, "failover", "--kills 2 --streams 12 --tokens 100")
    assert [one["equal"] for one in found["rounds"]] == [12, 12] and sum(one["continued"] for one in found["rounds"])


@pytest.mark.full
def test_http_cost(repo: Path, tmp_path: Path) -> None:
    flags = "--streams 4 --tokens 16 --repeats 1 --fronts 0 1"
    rounds = results(repo, tmp_path, "http_cost", flags)[1]["rounds"]
    assert sorted(rounds) == ["0", "1", "offline"] and all(one["tokens_per_s"] > 0 for (one,) in rounds.values())


@pytest.mark.full
@pytest.mark.timeout(700)
def test_hostile(repo: Path, tmp_path: Path) -> None:
    rows = results(repo, tmp_path, "hostile", "--rounds 1")[1]["rows"]
    assert len(rows) > 30  # the script exits with 1 if a stream ends or an answer is of the wrong kind


@pytest.mark.full
def test_structured(repo: Path, tmp_path: Path) -> None:
    _, found = results(repo, tmp_path, "structured", "--rows 2 --tokens 8 --repeats 1")
    assert [one["rows"] for one in found["costs"]] == [2] and found["costs"][0]["ratio"] > 0
    assert {one["said"] == "compiled" for one in found["compilation"]} == {True, False}


@pytest.mark.full
def test_a_short_storm_passes(repo: Path, tmp_path: Path) -> None:
    """Run the storm for 20 s; the script exits with 1, and run() fails, on any problem."""
    flags = "--minutes 0.34 --measure 5 --turn-every 1 --most-growth 1000"
    said, found = results(repo, tmp_path, "soak", flags)
    assert "all checks passed" in said
    assert found["requests"] > 5 and found["ends"] and found["wrong"] == []
    assert found["role_changes"] > 3 and found["after"]["moved"] > 0


@pytest.mark.full
def test_floor_served(repo: Path, tmp_path: Path) -> None:
    flags = "--model demo --policies unified --requests 4 --prompt 8 --tokens 6 --repeats 1"
    text, found = results(repo, tmp_path, "floor_served", flags, timeout=300)
    rows = found["rows"]
    assert [(row["regime"], row["policy"]) for row in rows] == [
        (regime, policy) for regime in ("none", "below") for policy in ("vllm", "unified")
    ]
    assert all(row["tokens_per_s"] == pytest.approx(24 / row["seconds"]) for row in rows)
    assert "unified" in text
