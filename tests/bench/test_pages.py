"""Reproduction pages agree with the JSON files behind their tables."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PAPERS = ("deflection", "fairbatching", "flowprefill", "kairos", "slos_serve")


@pytest.fixture(scope="module")
def page(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("benchmarks/reproduce/page.py")


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_shows_its_newest_results(page: ModuleType, repo: Path, paper: str) -> None:
    path = page.newest(paper)
    assert path is not None
    text = (repo / "docs" / "research" / f"{paper}.md").read_text()
    blocks = page.blocks(path, json.loads(path.read_text()))
    marked = re.findall(r"<!-- table: (\S+) -->", text)
    assert len(marked) == len(set(marked)) and set(marked) >= set(blocks), "results without a marker"
    for name in marked:
        found = page.marked(name).search(text)[1]
        assert found == blocks[name] + "\n" if name in blocks else found.startswith("Of 20"), name


def test_all_tables_are_of_one_state_of_the_source(page: ModuleType) -> None:
    """Making one table again means making the others too, with `python benchmarks/reproduce`."""
    documents = [json.loads(page.newest(paper).read_text()) for paper in PAPERS]
    assert len({table["source"] for document in documents for table in document["tables"].values()}) == 1


@pytest.mark.parametrize("paper", PAPERS)
def test_pictures_of_a_page_exist_and_are_small(repo: Path, paper: str) -> None:
    folder = repo / "docs" / "research"
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (folder / f"{paper}.md").read_text()):
        assert (folder / name).is_file(), name
        if name.startswith("plots/"):
            assert (folder / name).stat().st_size < 60_000


def test_tables_of_another_state_of_the_source_are_made_again(
    page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page.common, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PAGES", tmp_path)
    (tmp_path / "one.md").write_text(
        "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in ("results", "a", "b"))
    )
    (tmp_path / "one-2026-11-23.json").write_text(json.dumps({"tables": {"a": {"source": "old", "seconds": 1.0}}}))
    monkeypatch.setattr(page, "source", lambda: "new")
    assert page.missing("one", ["a", "b"]) == ["a", "b"]
    for name in "ab":
        page.save("one", name, page.Table("A", ["x"], [[1.0]]), 60.0)
    assert page.missing("one", ["a", "b"]) == [] and len(list(tmp_path.glob("*.json"))) == 1
    assert "at one state of the source in 2 minutes" in (tmp_path / "one.md").read_text()
    monkeypatch.setattr(page, "source", lambda: "newer")
    assert page.missing("one", ["a", "b"]) == ["a", "b"]


def test_uncommitted_changes_are_refused(
    page: ModuleType, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "page", page)
    monkeypatch.setattr(page.common, "git", lambda *words: " M sched/metrics.py")
    monkeypatch.setattr(sys, "argv", ["reproduce"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(repo / "benchmarks" / "reproduce"), run_name="__main__")
    assert stopped.value.code == 2 and "uncommitted changes; commit or stash them first:" in capsys.readouterr().err
