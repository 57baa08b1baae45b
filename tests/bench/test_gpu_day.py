"""The runner of the day of the GPU: whatever a part does, it costs that part only, and the state resumes."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_day import carry, cases, parts
from benchmarks.gpu_day.child import function_of
from benchmarks.gpu_day.part import Part, Run, append
from benchmarks.gpu_day.state import Attempt, State, best
from tests.support.bench.gpu_parts import DAY
from tests.support.timing import until

PARTS = "tests.support.bench.gpu_parts"


def command(folder: Path, *flags: str) -> list[str]:
    where = ["--state", str(folder / "state"), "--out", str(folder / "out")]
    return [sys.executable, "-m", "benchmarks.gpu_day", "--dry", "--module", PARTS, *where, *flags]


def call(repo: Path, folder: Path, day: str, *flags: str) -> str:
    """Run a day of simulated parts, and return what it printed."""
    done = ended(repo, command(folder, *flags), **{DAY: day})
    assert done.returncode == 0, done.stderr
    return done.stdout


def ended(repo: Path, words: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run(words, cwd=repo, env=given, capture_output=True, text=True, timeout=200)


def outcomes(folder: Path) -> dict[str, list[str]]:
    return {name: [run.outcome for run in runs] for name, runs in State(folder / "dry").attempts().items()}


def gone(pids: Sequence[Path]) -> bool:
    """Return whether the processes whose numbers these files hold have ended."""
    return bool(pids) and not any(Path("/proc", path.read_text()).exists() for path in pids)


@pytest.fixture(scope="module")
def day(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of one call with one part of each kind, and what it printed."""
    folder = tmp_path_factory.mktemp("day")
    return folder, call(repo, folder, "whole")


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
    "items": "failed",
}
ITEMS = {
    "right": "done", "aborts": "killed", "wrong": "wrong", "hangs": "killed", "unable": "skipped", "last": "done"
}  # fmt: skip


def test_each_part_costs_itself_only(day: tuple[Path, str]) -> None:
    """A hang, a crash and a sticky error end their part, with the reason; all other parts run, and all rows are kept.

    A part's children end with it, though they ignore SIGTERM and are in sessions of their own.
    """
    folder, said = day
    runs = State(folder / "out" / "dry").attempts()
    assert outcomes(folder / "out") == {name: [outcome] for name, outcome in EXPECTED.items()}
    reasons = {name: attempts[-1].reason for name, attempts in runs.items()}
    assert "stopped after" in reasons["hang"]
    assert str(-signal.SIGABRT) in reasons["abort"] and str(-signal.SIGSEGV) in reasons["segfault"]
    assert reasons["sticky"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
    assert reasons["absent"] == "not installed: no_such_module" and "no such thing" in reasons["unable"]
    assert "4 of 11 parts need no other call" in said and "missing:" in said
    for name in ("hang", "abort", "segfault", "sticky"):
        assert runs[name][0].rows == [("partial", {"part": name})]
    ((table, row),) = runs["with a fact"][0].rows
    assert table == "facts" and row["value"] == 1.5 and 0 < row["left"] < 30
    assert gone([folder / "state" / "dry" / "files" / f"{name}.pid" for name in ("hang", "orphan")])


def test_an_item_that_ends_its_process_costs_itself_and_the_report_names_what_is_missing(day: tuple[Path, str]) -> None:
    """The part goes on behind an item that aborts or hangs in the device."""
    folder, _ = day
    run = Run(Part("x", 1, ""), True, State(folder / "out" / "dry").path, folder, {}, 0.0)
    assert {name: row["outcome"] for name, row in run.items().items()} == ITEMS
    text = (folder / "out" / "dry" / "report.md").read_text()
    assert "6 begun: 2 done, 2 killed, 1 wrong, 1 skipped" in text
    assert "AssertionError: relative error 0.4 is more than 0.01" in text
    assert "## ceilings" in text and "| copy | 1.5 |" in text and "| hang | hung | stopped after" in text
    assert "A dry run" in text


def test_next_call_resumes(repo: Path, day: tuple[Path, str], tmp_path: Path) -> None:
    """What a call returned is the state of the next: done parts are skipped, failed ones run once more, not twice."""
    folder, _ = day
    (folder / "out").rename(tmp_path / "state")
    call(repo, tmp_path, "whole")
    done = {name: ["done"] for name, outcome in EXPECTED.items() if outcome == "done"}
    again = {name: [outcome] * 2 for name, outcome in EXPECTED.items() if outcome != "done"}
    assert outcomes(tmp_path / "out") == done | again
    call(repo, tmp_path, "whole", "--again", "ceiling", "--again", "sticky")
    again["absent"] += ["skipped"]  # the wheel may have been carried since
    again["unable"] += ["skipped"]
    again["sticky"] += ["failed"]
    assert outcomes(tmp_path / "out") == done | again | {"ceiling": ["done", "done"]}
    (tmp_path / "out").rename(folder / "out")


def test_budget_and_recovery(repo: Path, tmp_path: Path) -> None:
    """A part that the end of the call cuts is tried again; the rows of the run that was done count."""
    call(repo, tmp_path, "short", "--minutes", "0.01")
    assert outcomes(tmp_path / "out") == {}, "no part fits into 0.6 s"
    call(repo, tmp_path, "short", "--minutes", "1", "--again", "recovers")
    found = outcomes(tmp_path / "state")
    assert found == {"recovers": ["failed"], "long": ["hung"]}
    call(repo, tmp_path, "short", "--minutes", "0.05")
    assert outcomes(tmp_path / "state") == {"recovers": ["failed"], "long": ["hung", "cut"]}
    call(repo, tmp_path, "short", "--minutes", "0.6")
    runs = State(tmp_path / "state" / "dry").attempts()
    assert [run.outcome for run in runs["recovers"]] == ["failed", "done"]
    assert best(runs["recovers"]).rows == [("tries", {"number": 2})]


def test_checks_share_the_device_and_their_items(repo: Path, tmp_path: Path) -> None:
    """Two parts are inside of the device together; what asks for it alone is alone; every item is done once."""
    call(repo, tmp_path, "beside")
    assert outcomes(tmp_path / "out") == {"check 0": ["done"], "check 1": ["done"], "after": ["done"]}
    rows = [row for run in State(tmp_path / "out" / "dry").attempts().values() for row in run[0].rows]
    done = [row["item"] for table, row in rows if table == "items" and row["outcome"] == "done"]
    assert sorted(done) == sorted(["check 0 shared", "check 1 shared", *(f"alone {number}" for number in range(8))])


def test_a_stopped_call_returns_its_state(repo: Path, tmp_path: Path) -> None:
    """SIGTERM ends the part that runs with its children, and leaves the state in --out."""
    words, given = command(tmp_path, "--again", "long"), {**os.environ, DAY: "short"}
    process = subprocess.Popen(words, cwd=repo, env=given, stdout=subprocess.PIPE, text=True)
    pid = tmp_path / "state" / "dry" / "files" / "long.pid"
    until(lambda: process.poll() is not None or (pid.exists() and pid.read_text()))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "0 of 2 parts need no other call" in said
    assert outcomes(tmp_path / "out")["long"] == ["cut"] and gone([pid])


def test_cards_are_not_mixed(repo: Path, tmp_path: Path) -> None:
    """Each card has a state of its own, as a dry run has; without a card nothing is measured."""
    other = State(tmp_path / "state" / "NVIDIA-H100")
    other.append({"part": "ceiling", "begin": True})
    with other.path.open("a") as file:
        file.write('{"part": "ceil')
    before = other.path.read_bytes()
    said = call(repo, tmp_path, "short", "--minutes", "0.01")
    assert "left alone: the state of NVIDIA-H100; this is dry" in said and other.path.read_bytes() == before
    real = [word for word in command(tmp_path) if word != "--dry"]
    done = ended(repo, real, PATH=str(tmp_path))
    assert done.returncode == 1 and "no NVIDIA driver here" in done.stderr
    assert "missing: git; excludes the commit" in done.stdout, "it works without git"
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 580.1, 700 W, 1980 MHz, 81559 MiB'\n")
    smi.chmod(0o755)
    done = ended(repo, [*real, "--minutes", "0.01"], PATH=f"{smi.parent}:{os.environ['PATH']}")
    assert done.returncode == 0 and "left alone: the state of dry; this is NVIDIA-H100" in done.stdout
    assert "was cut off and is ignored" in done.stdout


def test_torn_lines_cost_themselves(tmp_path: Path) -> None:
    """A line that was cut when the machine went away costs no other line; an attempt without an end is repeated."""
    state = State(tmp_path)
    for record in ({"part": "x", "begin": True}, {"part": "x", "table": "t", "row": {"a": 1}}):
        state.append(record)
    with state.path.open("a") as file:
        file.write('{"part": "x", "table": "t", "ro')
    state = State(tmp_path)
    append(state.path, {"part": "x", "fact": "f", "value": 2})
    (run,) = state.attempts()["x"]
    assert run == Attempt("x", rows=[("t", {"a": 1})], facts={"f": 2}) and run.outcome == "interrupted"


def test_files_come_back_and_go_out_again(tmp_path: Path) -> None:
    """The packed files of a call are the files of the next; those too large are named."""
    state = State(tmp_path / "state")
    (state.files / "profiles").mkdir()
    (state.files / "profiles" / "one.json").write_text("[1]")
    with (state.files / "huge").open("wb") as file:
        file.truncate((16 << 20) + 1)
    assert state.export(tmp_path / "out") == ["huge"]
    assert (State(tmp_path / "out").files / "profiles" / "one.json").read_text() == "[1]"


def test_wheels_leave_only_ptxas(repo: Path, tmp_path: Path) -> None:
    """Of the compiler's wheel only ptxas is carried; unpacked, it is the first on PATH, which compiles the kernels."""
    wheel = tmp_path / "nvidia_cuda_nvcc-13.5-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("nvidia/cu13/bin/ptxas", "nvidia/cu13/bin/nvlink", "nvidia_cuda_nvcc-13.5.dist-info/METADATA"):
            made.writestr(name, f"#!/bin/sh\necho {name}\n")
    program = (
        "import os, shutil, sys; from pathlib import Path\n"
        "from benchmarks.gpu_day import carry; from pallas_kernels import ptxas\n"
        "folder = Path(sys.argv[1]); carry.trim(next(folder.glob('*.whl'))); carry.unpack(folder, folder / 'site')\n"
        "print(shutil.which('ptxas'), ptxas.found(), os.environ['CUDA_ROOT'], sep='|')"
    )
    done = ended(repo, [sys.executable, "-c", program, str(tmp_path)])
    root = tmp_path / "site" / "nvidia" / "cu13"
    *missing, last = done.stdout.strip().splitlines()
    assert last == f"{root}/bin/ptxas|{root}/bin/ptxas|{root}", done.stderr
    assert not (root / "bin" / "nvlink").exists()
    assert [line.split(" in ")[0] for line in missing] == [
        f"missing: the wheel of {name}" for name in ("llguidance", "msgspec")
    ]


def test_what_travels_is_weighed(tmp_path: Path) -> None:
    assert "of checkout, at most 67.1 MB" in carry.weighed(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(carry.LIMIT)
    with pytest.raises(carry.TooLarge, match=r"are more than the 67\.1 MB that may travel"):
        carry.weighed(tmp_path)


def test_wheels_have_the_least_versions_of_the_project(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["dependencies"]
    assert carry.asked()[:2] == [line for line in sorted(project) if line.startswith(("llguidance", "msgspec"))]


def test_parts_can_be_called() -> None:
    """Every part names a function that takes its arguments, a dry day leaves none out, and no two share a name."""
    whole, dry = parts.parts(False), parts.parts(True)
    for part in (*whole, *dry):
        inspect.signature(function_of(part)).bind(None, **part.arguments)
    assert len({part.name for part in whole}) == len(whole) and all(0 < part.seconds <= 300 for part in whole)
    assert {part.call for part in whole} == {part.call for part in dry}


def test_the_first_cases_are_those_that_engines_choose() -> None:
    """The order of the cases puts about 50 of over 200 first, some of every family."""
    names = list(cases.all_cases())
    first = [name for name in names if cases.FIRST.fullmatch(name)]
    assert names[: len(first)] == first and 40 <= len(first) <= 60 and len(names) > 200
    assert {name.partition(":")[0] for name in first} == set(cases.FAMILIES)
