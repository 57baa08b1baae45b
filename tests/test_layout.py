"""Shared test code is in tests/support: no test module imports another, and each is collected on its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def imported(source: str) -> Iterator[str]:
    """Return the names of modules that a source imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def offences(source: str, modules: frozenset[str]) -> list[str]:
    """Return imports of test modules or conftests.

    `modules` are the existing ones, since functions may be called test_ too.
    """
    return [name for name in imported(source) if name.rpartition(".")[2] in modules]


def test_no_test_module_imports_another(repo: Path) -> None:
    sources = sorted((repo / "tests").rglob("*.py"))
    modules = frozenset(path.stem for path in sources if path.stem.startswith("test_") or path.stem == "conftest")
    assert {"test_layout", "conftest"} <= modules
    found = {path.relative_to(repo).as_posix(): offences(path.read_text(encoding="utf-8"), modules) for path in sources}
    assert not {path: names for path, names in found.items() if names}, "move shared code to tests/support"


def test_support_holds_no_tests(repo: Path) -> None:
    """pytest would not collect them, since no file there is called test_*.py."""
    found = [
        f"{path.relative_to(repo)}:{node.lineno}"
        for path in sorted((repo / "tests" / "support").rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert not found
