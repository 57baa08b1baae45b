"""Reproduction pages agree with the JSON files behind their tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PAPERS = ("deflection", "fairbatching", "flowprefill", "kairos")


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


@pytest.mark.parametrize("paper", PAPERS)
def test_pictures_of_a_page_exist_and_are_small(repo: Path, paper: str) -> None:
    folder = repo / "docs" / "research"
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", (folder / f"{paper}.md").read_text()):
        assert (folder / name).is_file(), name
        if name.startswith("plots/"):
            assert (folder / name).stat().st_size < 60_000
