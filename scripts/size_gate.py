"""Small is a gate: 400 lines a file, 80 a function, 150 a kernel body. Prints what is too long and exits 1."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE, FUNCTION, KERNEL = 400, 80, 150
FOLDERS = ("benchmarks", "configs", "examples", "jaxserve", "pallas_kernels", "sched", "scripts", "tests")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> Iterator[Path]:
    """Every Python file of the repository once: what lies behind a symlink is read where it points."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() == (root.resolve() / path.relative_to(root)):
                yield path


def limit(path: Path, function: Function) -> int:
    """A kernel body, or the wrapper that it is nested in, may be longer: it is one thing that cannot be cut."""
    if "pallas_kernels" not in path.parts:
        return FUNCTION
    names = [node.name for node in ast.walk(function) if isinstance(node, Function)]
    return KERNEL if any("kernel" in name or "body" in name for name in names) else FUNCTION


def too_long(root: Path, path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    name, lines = path.relative_to(root), len(text.splitlines())
    if lines > FILE:
        yield f"{name}: {lines} lines, the limit is {FILE}"
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, Function) and node.end_lineno is not None:
            length, most = node.end_lineno - node.lineno + 1, limit(name, node)
            if length > most:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, the limit is {most}"


def main(root: Path) -> int:
    found = [line for path in sources(root) for line in too_long(root, path)]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
