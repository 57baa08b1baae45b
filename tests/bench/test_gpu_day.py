"""The runner of the day of the GPU: whatever a part does, it costs that part only, and the state resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.gpu_day.part import append
from benchmarks.gpu_day.state import Attempt, State, best

PARTS = "tests.support.bench.gpu_parts"


def command(folder: Path, stage: str, *flags: str) -> list[str]:
    where = ["--state", str(folder / "state"), "--out", str(folder / "out")]
    return [sys.executable, "-m", "benchmarks.gpu_day", "--stage", stage, "--dry", "--modules", PARTS, *where, *flags]


def call(repo: Path, folder: Path, stage: str, *flags: str) -> str:
    """Run a stage of simulated parts, and return what it printed."""
    done = subprocess.run(command(folder, stage, *flags), cwd=repo, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcomes(folder: Path) -> dict[str, list[str]]:
    return {name: [run.outcome for run in runs] for name, runs in State(folder).attempts().items()}


def gone(pids: Sequence[Path]) -> bool:
    """Return whether the processes whose numbers these files hold have ended."""
    return bool(pids) and not any(Path("/proc", path.read_text()).exists() for path in pids)


@pytest.fixture(scope="module")
def day(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of one call with one part of each kind, and what it printed."""
    folder = tmp_path_factory.mktemp("day")
    return folder, call(repo, folder, "A")


EXPECTED = {
    "ceiling": "done",
    "hang": "hung",
    "abort": "failed",
    "segfault": "failed",
    "sticky": "failed",
    "after sticky": "done",
    "orphan": "done",
    "absent": "skipped",
    "unable": "skipped",
    "with a fact": "done",
}


def test_each_part_costs_itself_only(day: tuple[Path, str]) -> None:
    """A hang, a crash and a sticky error end their part, with the reason; all other parts run."""
    folder, said = day
    state = State(folder / "out")
    assert outcomes(folder / "out") == {name: [outcome] for name, outcome in EXPECTED.items()}
    reasons = {name: runs[-1].reason for name, runs in state.attempts().items()}
    assert "stopped after" in reasons["hang"]
    assert str(-signal.SIGABRT) in reasons["abort"] and str(-signal.SIGSEGV) in reasons["segfault"]
    assert reasons["sticky"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    assert reasons["absent"] == "not installed: no_such_module" and "no such thing" in reasons["unable"]
    assert "4 of 10 parts need no other call" in said and "missing:" in said


def test_rows_before_a_failure_are_kept(day: tuple[Path, str]) -> None:
    folder, _ = day
    runs = State(folder / "out").attempts()
    for name in ("hang", "abort", "segfault", "sticky"):
        assert runs[name][0].rows == [("partial", {"part": name})]
    ((table, row),) = runs["with a fact"][0].rows
    assert table == "facts" and row["value"] == 1.5 and 0 < row["left"] < 30


def test_nothing_survives_its_part(day: tuple[Path, str]) -> None:
    """A part's children end with it, though they ignore SIGTERM and are in sessions of their own."""
    folder, _ = day
    assert gone([folder / "state" / "files" / f"{name}.pid" for name in ("hang", "orphan")])


def test_report_names_what_is_missing(day: tuple[Path, str]) -> None:
    folder, _ = day
    text = (folder / "out" / "report.md").read_text()
    assert "## ceilings" in text and "| copy | 1.5 |" in text and "| hang |" in text
    assert "| A | hang | hung | stopped after" in text and "| B | first hang | not started |  |" in text
    assert "A dry run" in text


def test_next_call_resumes(repo: Path, day: tuple[Path, str], tmp_path: Path) -> None:
    """What a call returned is the state of the next: done parts are skipped, failed ones run once more, not twice."""
    folder, _ = day
    (folder / "out").rename(tmp_path / "state")
    call(repo, tmp_path, "A")
    done = {name: ["done"] for name, outcome in EXPECTED.items() if outcome == "done"}
    again = {name: [outcome] * 2 for name, outcome in EXPECTED.items() if outcome != "done"}
    assert outcomes(tmp_path / "out") == done | again
    call(repo, tmp_path, "A", "--again", "ceiling", "--again", "sticky")
    again["absent"] += ["skipped"]  # the wheel may have been carried since
    again["unable"] += ["skipped"]
    again["sticky"] += ["failed"]
    assert outcomes(tmp_path / "out") == done | again | {"ceiling": ["done", "done"]}
    (tmp_path / "out").rename(folder / "out")


def test_two_hangs_end_the_stage(repo: Path, tmp_path: Path) -> None:
    said = call(repo, tmp_path, "B")
    assert outcomes(tmp_path / "out") == {"first hang": ["hung"], "second hang": ["hung"]}
    assert "ended after 2 parts that hung" in said and "1 parts were not started: never started" in said


def test_budget_and_recovery(repo: Path, tmp_path: Path) -> None:
    """A part that the end of the call cuts is tried again; the rows of the run that was done count."""
    call(repo, tmp_path, "C", "--minutes", "0.01")
    assert outcomes(tmp_path / "out") == {}, "no part fits into 0.6 s"
    call(repo, tmp_path, "C", "--minutes", "1", "--again", "recovers")
    found = outcomes(tmp_path / "state")
    assert found == {"recovers": ["failed"], "long": ["hung"]}
    call(repo, tmp_path, "C", "--minutes", "0.05")
    assert outcomes(tmp_path / "state") == {"recovers": ["failed"], "long": ["hung", "cut"]}
    call(repo, tmp_path, "C", "--minutes", "0.6")
    runs = State(tmp_path / "state").attempts()
    assert [run.outcome for run in runs["recovers"]] == ["failed", "done"]
    assert best(runs["recovers"]).rows == [("tries", {"number": 2})]


def test_checks_run_beside_each_other(repo: Path, tmp_path: Path) -> None:
    call(repo, tmp_path, "D", "--jobs", "2")
    assert outcomes(tmp_path / "out") == {"beside 0": ["done"], "beside 1": ["done"]}


def test_a_stopped_call_returns_its_state(repo: Path, tmp_path: Path) -> None:
    """SIGTERM ends the part that runs with its children, and leaves the state in --out."""
    process = subprocess.Popen(command(tmp_path, "C", "--again", "long"), cwd=repo, stdout=subprocess.PIPE, text=True)
    pid = tmp_path / "state" / "files" / "long.pid"
    until = time.monotonic() + 60
    while process.poll() is None and not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "0 of 2 parts need no other call" in said
    assert outcomes(tmp_path / "out")["long"] == ["cut"] and gone([pid])


def test_a_dry_state_stays_dry(repo: Path, tmp_path: Path) -> None:
    """Figures of a CPU never mix with those of a device, and a stage without a device does not start."""
    state = State(tmp_path / "state")
    state.append({"call": {"dry": False, "missing": []}})
    done = subprocess.run(command(tmp_path, "D"), cwd=repo, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "use another state folder" in done.stderr
    real = [word for word in command(tmp_path, "D") if word != "--dry"]
    done = subprocess.run(
        real, cwd=repo, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": str(tmp_path)}
    )
    assert done.returncode == 1 and "no NVIDIA driver here" in done.stderr
    assert "missing: git; excludes the commit" in done.stdout, "it works without git"


def test_torn_lines_cost_themselves(tmp_path: Path) -> None:
    """A line that was cut when the machine went away costs no other line; an attempt without an end is repeated."""
    state = State(tmp_path)
    for record in ({"part": "x", "begin": "A"}, {"part": "x", "table": "t", "row": {"a": 1}}):
        state.append(record)
    with state.path.open("a") as file:
        file.write('{"part": "x", "table": "t", "ro')
    state = State(tmp_path)
    append(state.path, {"part": "x", "fact": "f", "value": 2})
    (run,) = state.attempts()["x"]
    assert run == Attempt("x", "A", -1, rows=[("t", {"a": 1})], facts={"f": 2}) and run.outcome == "interrupted"


def test_files_come_back_and_go_out_again(tmp_path: Path) -> None:
    """The packed files of a call are the files of the next; those too large are named."""
    state = State(tmp_path / "state")
    (state.files / "profiles").mkdir()
    (state.files / "profiles" / "one.json").write_text("[1]")
    with (state.files / "huge").open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert state.export(tmp_path / "out") == ["huge"]
    assert (State(tmp_path / "out").files / "profiles" / "one.json").read_text() == "[1]"


def test_wheels_leave_only_ptxas(tmp_path: Path) -> None:
    """Of the compiler's wheel only ptxas is carried; unpacked, it can be run and is what jax is told to use."""
    wheel = tmp_path / "nvidia_cuda_nvcc-13.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("nvidia/cu13/bin/ptxas", "nvidia/cu13/bin/nvlink", "nvidia_cuda_nvcc-13.5.dist-info/METADATA"):
            made.writestr(name, f"#!/bin/sh\necho {name}\n")
    program = (
        "import os, sys; from pathlib import Path; from benchmarks.gpu_day import probe, wheels\n"
        "folder = Path(sys.argv[1]); wheels.trim(next(folder.glob('*.whl'))); wheels.unpack(folder, folder / 'site')\n"
        "print(probe.ptxas(), os.environ['CUDA_ROOT'], probe.said(str(probe.ptxas())), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    root = tmp_path / "site" / "nvidia" / "cu13"
    assert done.stdout.strip() == f"{root}/bin/ptxas|{root}|nvidia/cu13/bin/ptxas", done.stderr
    assert not (root / "bin" / "nvlink").exists()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", "AB")
def test_dry(repo: Path, tmp_path: Path, stage: str) -> None:
    """Every part of a dry run ends, and nothing fails; skips are for want of a device or of a newer jax."""
    flags = ["--stage", stage, "--dry", "--state", str(tmp_path / "state"), "--out", str(tmp_path / "out")]
    run = [sys.executable, "-m", "benchmarks.gpu_day", *flags]
    done = subprocess.run(run, cwd=repo, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {name: runs[-1].outcome for name, runs in State(tmp_path / "out").attempts().items()}
    assert found and set(found.values()) <= {"done", "skipped"}, done.stdout
    report = [sys.executable, "-m", "benchmarks.gpu_day", "--report", *flags[3:]]
    subprocess.run(report, cwd=repo, check=True, timeout=100)
    if stage == "A" or jax.__version_info__ >= (0, 11):  # the kernels of stage B need its interpreter
        assert (tmp_path / "out" / "kernels.png").stat().st_size > 0
    for line in (tmp_path / "out" / "state.jsonl").read_text().splitlines():
        json.loads(line)
