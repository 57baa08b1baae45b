"""Warn about long files and functions, and fail for very long ones.

A file warns above 500 lines and fails above 800; a function warns above 60 and fails above 100. A kernel body, which
cannot be split, fails above 150. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE, FUNCTION, KERNEL = (500, 800), (60, 100), (60, 150)  # lines: (warning, failure)
FOLDERS = ("benchmarks", "configs", "examples", "jaxserve", "pallas_kernels", "sched", "scripts", "tests")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> Iterator[Path]:
    """Yield every Python file of the repository once, without the paths through symlinks."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() == (root.resolve() / path.relative_to(root)):
                yield path


def limits(path: Path, function: Function) -> tuple[int, int]:
    """Return the lines above which a function warns and fails. A kernel body or its wrapper may be longer."""
    if "pallas_kernels" not in path.parts:
        return FUNCTION
    names = [node.name for node in ast.walk(function) if isinstance(node, Function)]
    return KERNEL if any("kernel" in name or "body" in name for name in names) else FUNCTION


def too_long(root: Path, path: Path) -> Iterator[tuple[bool, str]]:
    """Yield (whether it fails, message) for a file and its functions."""
    text = path.read_text(encoding="utf-8")
    name, lines = path.relative_to(root), len(text.splitlines())
    if lines > FILE[0]:
        yield lines > FILE[1], f"{name}: {lines} lines, {allowed(lines, FILE)}"
    for node in ast.walk(ast.parse(text, str(path))):
        if isinstance(node, Function) and node.end_lineno is not None:
            length, bounds = node.end_lineno - node.lineno + 1, limits(name, node)
            if length > bounds[0]:
                what = f"{name}:{node.lineno}: {node.name} has {length} lines, {allowed(length, bounds)}"
                yield length > bounds[1], what


def allowed(lines: int, bounds: tuple[int, int]) -> str:
    """Return which of two bounds is exceeded, in words."""
    return f"the limit is {bounds[1]}" if lines > bounds[1] else f"above {bounds[0]} is long"


def main(root: Path) -> int:
    found = [one for path in sources(root) for one in too_long(root, path)]
    for fails, line in found:
        print(line if fails else f"warning: {line}")
    return 1 if any(fails for fails, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
