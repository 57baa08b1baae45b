"""A policy from a file decides like one of the registry, and errors say what is wrong with the file."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.config import ServeConfig
from jaxserve.sched import policies
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.journal import replay
from tests.support.sched.cases import drawn
from tests.support.sched.harness import Job
from tests.support.sched.laws import check_laws
from tests.support.sched.recorded import perf, recorded

SJF = """
from jaxserve.sched.policies.halves import Halves
from jaxserve.sched.policies.continuous import Continuous
from jaxserve.sched.policies.sjf import Sjf


class Mine(Halves):
    def __init__(self, ageing: float = 0.0) -> None:
        super().__init__(Sjf(ageing=ageing), Continuous())


class First(Sjf):
    pass


class Then(Continuous):
    pass
"""
BROKEN = """
from jaxserve.sched.api.policy import Decision, Grant


class Raises:
    def decide(self, view):
        return Decision(view.nothing)  # line 7


class Lists:
    def decide(self, view):
        return []


class Alien:
    def decide(self, view):
        return Decision((Grant(10**6, 1),))


class Idle:
    def decide(self, view):
        return Decision()


class Unready:
    def __init__(self):
        raise RuntimeError("not today")

    decide = None


class Demands:
    def __init__(self, must):
        pass

    def decide(self, view):
        return Decision()


helper = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a slash before `draft` in its path, as the suffix has."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "mine.py").write_text(SJF)
    (folder / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def page(repo: Path) -> str:
    return (repo / "docs" / "guide" / "own-policy.md").read_text(encoding="utf-8")


def journal(policy: str, **shape: Any) -> str:
    jobs = [Job(range(1000 * i, 1000 * i + 5 + 7 * i % 30), 4 + i % 5, i * 0.001) for i in range(12)]
    return recorded(jobs, "1x1", policy, **shape)


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ("file:./mine.py:Mine", "sjf"),
        ("file:mine.py:Mine:ageing=0.5", "sjf:ageing=0.5"),
        ("file:./mine.py:Mine/draft:no-adaptive", "sjf/draft:no-adaptive"),
        ("prefill=file:./mine.py:First,decode=kairos", "prefill=sjf,decode=kairos"),
        ("prefill=fcfs,decode=file:./mine.py:Then", "prefill=fcfs,decode=continuous"),
    ],
)
def test_a_file_decides_as_the_same_policy_by_name(folder: Path, own: str, known: str) -> None:
    shape = {"draft": 3, "acceptance": 0.6}
    mine, theirs = journal(own, **shape), journal(known, **shape)
    assert mine.replace(own, known) == theirs != mine


def test_the_policy_of_the_page_runs_and_keeps_the_laws(folder: Path, page: str) -> None:
    text, rows = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in text.splitlines() if line]) <= 10
    before, decide, after = text.partition("    def decide(self, view: View) -> Decision:\n")
    (folder / "mine.py").write_text(before + decide + indent(rows, " " * 8) + after)
    for mesh in ("1", "1P1D"):
        check_laws("file:./mine.py:Mine", (mesh, "least_work", "none"), *drawn("the page"))


def test_two_processes_load_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = "file:./mine.py:Mine,prefill=file:mine.py:Mine,decode=kairos,sjf"
    assert main(["simulate", "--policy", named, "--qps", "3", "--num-requests", "20", "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "file:./mine.py:Mine" in printed and "prefill=file:mine.py:Mine,decode=kairos" in printed


def test_a_changed_file_is_read_again(folder: Path) -> None:
    before = type(policies.make("file:./mine.py:Mine"))
    (folder / "mine.py").write_text("class Other:\n    def decide(self, view): pass\n")
    with pytest.raises(InvalidValue, match=r"mine.py has no class 'Mine'; its policies: Other"):
        policies.make("file:./mine.py:Mine")
    assert type(policies.make("file:./mine.py:Other")) is before  # the guard of all of them


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("file:./none.py:Mine", r"policy file '/.*/draft/none.py' cannot be read: No such file"),
        ("file:./mine.py", r"'file:./mine.py' must be file:PATH.py:CLASS, as in file:./mine.py:Mine"),
        ("file:./mine:Mine", "must be file:PATH.py:CLASS"),
        ("file:./mine.py:Mine:size=3", "has no option 'size=3'; its options: ageing=0.0"),
        ("file:./mine.py:Mine:ageing=2", r"ageing=2.0 must be a share of the time, 0 to 1"),
        ("file:./broken.py:helper", "no class 'helper'; its policies: Raises, Lists, Alien, Idle, Unready, Demands"),
        ("file:./broken.py:Unready", r"class Unready of /.*/broken.py has no method decide\(self, view\)"),
        ("file:./broken.py:Demands", r"Demands\(\) failed: .*missing 1 required positional argument: 'must'"),
        ("file:./syntax.py:Mine", r"cannot be imported: /.*/syntax.py:2: SyntaxError"),
        ("file:./name.py:Mine", r"cannot be imported: /.*/name.py:3: NameError: name 'undefined' is not defined"),
        ("prefill=file:./none.py:Mine,decode=kairos", "prefill policy file '/.*/none.py' cannot be read"),
    ],
)
def test_what_is_wrong_is_said_with_status_2(
    folder: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "syntax.py").write_text("import os\nx = (\n")
    (folder / "name.py").write_text("import os\n\nundefined\n")
    with pytest.raises(InvalidValue, match=says):
        ServeConfig(policy=text)
    assert main(["simulate", "--policy", text, "--qps", "3"]) == 2
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Raises", r"policy Raises failed in decide: /.*/broken.py:7: AttributeError: .* no attribute 'nothing'"),
        ("Lists", r"policy Lists of /.*/broken.py: decide returned list, must be a Decision"),
        ("Alien", "the policy granted request 1000000, which is not in its view"),
        ("Idle", "A policy that grants none of the requests that wait does this"),
    ],
)
def test_a_wrong_decision_ends_a_simulation_with_its_reason(
    folder: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", "--policy", f"file:./broken.py:{name}", "--qps", "3", "--num-requests", "4"]
    assert main(asked) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("jaxserve simulate: error: ") and re.search(says, line)


def test_a_server_gets_an_absolute_path(folder: Path) -> None:
    """Its other processes may run in another folder."""
    for text in ("file:./mine.py:Mine:ageing=0.1", "prefill=file:mine.py:Mine,decode=file:mine.py:Mine"):
        (given,) = {ServeConfig(policy=text).policy, ServeConfig(policy=ServeConfig(policy=text).policy).policy}
        assert given == re.sub(r"file:(\./)?", f"file:{folder}/", text)
        assert str(folder) not in (seen := policies.shown(given)) and "file:mine.py:Mine" in seen
    drafts = '{"method": "ngram", "num_speculative_tokens": 2}'
    policies.make(ServeConfig(policy="file:./mine.py:Mine", speculative_config=drafts).decides)
    assert ServeConfig(policy="kairos:literal").policy == "kairos:literal"


def test_a_journal_runs_no_file_unless_the_caller_names_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A journal is data, and may come from elsewhere."""
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    text = journal(f"file:{folder}/mine.py:Mine")
    for name in ("mine", "evil"):
        (folder / "run.jsonl").write_text(text.replace("mine.py", f"{name}.py"))
        assert main(["replay", "run.jsonl", "--no-simulate"]) == 2
        assert "is code from a file, which only runs if you name it" in capsys.readouterr().err
        assert main(["replay", "run.jsonl", "--no-simulate", "--policy", "file:./mine.py:Mine"]) == 0
        assert ", 0 differ," in capsys.readouterr().out
    assert not replay(journal("sjf").splitlines(), perf, policy="kairos").differences, "no file: as recorded"
