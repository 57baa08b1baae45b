"""scripts/mutants: planted bugs, and the report about tests that miss them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("scripts/mutants.py")


def test_every_bug_can_be_planted(script: ModuleType, repo: Path) -> None:
    """If a mutated code line changes, update its entry in scripts/mutants.yaml.

    test_repo.py checks that the named tests exist.
    """
    mutants = script.load(script.TABLE)
    assert len(mutants) >= 30
    assert [one.problem(repo) for one in mutants] == [None] * len(mutants)


def test_the_newest_list_of_results_has_every_bug_caught(script: ModuleType, repo: Path) -> None:
    """After a change of the table, run scripts/mutants and commit its output, as its docstring says."""
    newest = max((repo / "benchmarks" / "results").glob("mutants-*.txt"))
    listed = re.findall(r"^(\S+) +[\d.]+ s  (.+?) +\S+\.py ", newest.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(("caught", one.name) for one in script.load(script.TABLE))


ENTRY = "- {{name: bug, file: code_.py, old: '{}', new: '{}', tests: test_code.py}}\n"


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("x + x", "x * x", 0, "caught"),
        ("x + x", "2 * x", 1, "SURVIVED"),
        # A file that cannot be imported proves nothing.
        pytest.param("x + x", "x +", 1, "BROKEN", marks=pytest.mark.full),
        ("y + y", "z", 1, "bug: its text occurs 0 times in code_.py, and must occur once"),
        ("x", "z", 1, "bug: its text occurs 3 times in code_.py, and must occur once"),
    ],
)
def test_a_bug_is_caught_or_the_status_says_so(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    old: str, new: str, status: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each pytest would import all of them
    root, table = tmp_path / "root", tmp_path / "table.yaml"
    root.mkdir()
    (root / "code_.py").write_text("def double(x):\n    return x + x\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "test_code.py").write_text("import code_ as code\n\ndef test_it():\n    assert code.double(3) == 6\n")
    table.write_text(ENTRY.format(old, new))
    assert script.main([], root, table) == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
    assert "x + x" in (root / "code_.py").read_text(), "only copies are changed"
