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


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A factory of small trees with one function, its test, and a table with the given entry."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "code.py").write_text("def double(x):\n    return x + x\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (root / "test_code.py").write_text("import code_ as code\n\ndef test_it():\n    assert code.double(3) == 6\n")
    (root / "code.py").rename(root / "code_.py")

    def made(entry: str) -> tuple[Path, Path]:
        table = tmp_path / "table.yaml"
        table.write_text(entry)
        return root, table

    return made


ENTRY = "- {{name: bug, file: code_.py, old: '{}', new: '{}', tests: test_code.py}}\n"


@pytest.mark.parametrize(
    ("old", "new", "status", "said"),
    [
        ("x + x", "x * x", 0, "caught"),
        ("x + x", "2 * x", 1, "SURVIVED"),
        # A file that cannot be imported proves nothing.
        pytest.param("x + x", "x +", 1, "BROKEN", marks=pytest.mark.full),
    ],
)
def test_a_bug_is_caught_or_the_status_says_so(
    script: ModuleType, tree: Callable[[str], tuple[Path, Path]], capsys: pytest.CaptureFixture[str],
    old: str, new: str, status: int, said: str,
) -> None:  # fmt: skip
    root, table = tree(ENTRY.format(old, new))
    assert script.main([], root, table) == status
    assert capsys.readouterr().out.startswith(said)
    assert "x + x" in (root / "code_.py").read_text(), "only copies are changed"


def test_text_that_does_not_occur_exactly_once_is_refused(
    script: ModuleType, tree: Callable[[str], tuple[Path, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    for old, count in (("y + y", 0), ("x", 3)):
        root, table = tree(ENTRY.format(old, "z"))
        assert script.main([], root, table) == 1
        assert f"bug: its text occurs {count} times in code_.py, and must occur once" in capsys.readouterr().err


def test_tests_that_fail_without_a_bug_are_reported(
    script: ModuleType, tree: Callable[[str], tuple[Path, Path]]
) -> None:
    root, table = tree(ENTRY.format("x + x", "x * x"))
    (root / "test_code.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(SystemExit, match="these tests fail without any bug"):
        script.main([], root, table)


@pytest.mark.parametrize("entry", ["- {name: bug, file: a.py, old: x, new: x, tests: t}\n", "- {name: bug}\n"])
def test_incomplete_entries_are_refused(script: ModuleType, tmp_path: Path, entry: str) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(entry)
    with pytest.raises(ValueError, match="bug"):
        script.load(table)
