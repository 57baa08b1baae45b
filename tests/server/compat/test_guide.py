"""The guides list what these cases show: each difference from a peer, how many cases there are, and each finding."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
CLIENTS = ROOT / "docs" / "guide" / "clients.md"
GUARANTEES = ROOT / "docs" / "guide" / "security-findings.md"
PEERS = {
    "test_tool_texts.py": "vLLM, texts of its parsers",
    "test_answers.py": "vLLM, SGLang and llama.cpp, answers and their streams",
    "test_agents.py": "agents, requests as they send them",
    "test_claude_code.py": "agents, requests as they send them",
    "test_codex.py": "agents, requests as they send them",
}


def rows(path: Path, title: str) -> list[list[str]]:
    """Return the cells of the table below a title of a guide."""
    lines = path.read_text().partition(f"\n{title}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_the_guide_lists_each_difference() -> None:
    found = set[tuple[str, ...]]()
    for path in FOLDER.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("Differs", "differs")
            ):
                found.add((*map(ast.literal_eval, node.args), path.name))
    listed = [tuple(cell.strip("`") if cell.endswith(".py`") else cell for cell in row)
              for row in rows(CLIENTS, "## Where answers differ")]  # fmt: skip
    assert len(listed) == len(set(listed)) and set(listed) == found


def suite_of(item: pytest.Item) -> str | None:
    """Return the peer that a case is from."""
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    return f"{case.suite.split()[0]}, requests" if item.path.name == "test_peers.py" else PEERS.get(item.path.name)


def test_the_guide_counts_the_cases(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.path.parent == FOLDER]
    if {item.path for item in items} != set(FOLDER.glob("test_*.py")) or request.config.getoption("keyword"):
        pytest.skip("a part of the cases is run")
    counts = Counter(filter(None, map(suite_of, items)))
    listed = {suite: int(count) for suite, count in rows(CLIENTS, "## Peers' tests")}
    assert set(listed) == set(counts) and all(counts[suite] >= count for suite, count in listed.items()), counts


def test_each_finding_has_a_case() -> None:
    """F1 to F21: faults that clients and peers' tests have shown."""
    listed = rows(GUARANTEES, "## What clients send")
    assert [row[0] for row in listed] == [f"F{number}" for number in range(1, 22)]
    for finding, _, tests in listed:
        names = [name.strip(" `") for name in tests.split(",")]
        assert any(name.startswith("tests/server/compat/") for name in names), finding
        for name in names:
            path, _, test = name.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert any(isinstance(node, ast.FunctionDef) and node.name == test for node in tree.body), name
