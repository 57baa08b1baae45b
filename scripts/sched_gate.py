"""`sched/` imports the standard library and numpy only, and never reads a clock, opens a socket or starts a thread.

`Executor.now` is its only clock, so the code cannot know whether time is real. import-linter sees imports between
packages; this sees every import statement of the folder, and the calls that would bring the time in by another door.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ALLOWED = (sys.stdlib_module_names | {"numpy"}) - {
    "concurrent",
    "multiprocessing",
    "queue",
    "sched",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "socketserver",
    "ssl",
    "subprocess",
    "threading",
    "time",
    "timeit",
    "_thread",
}
CALLS = {
    "datetime.now",
    "datetime.today",
    "datetime.utcnow",
    "date.today",
    "asyncio.to_thread",
    "asyncio.open_connection",
    "asyncio.start_server",
    "os.times",
}
THREADS = {"run_in_executor", "call_soon_threadsafe", "run_coroutine_threadsafe"}


def name_of(node: ast.expr) -> str:
    """Dotted name of an expression, as far as it has one: `asyncio.get_running_loop()` -> asyncio.get_running_loop."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return ""


def faults(tree: ast.Module, depth: int) -> Iterator[tuple[int, str]]:
    """(line, fault) of a file `depth` folders below `sched/`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] if node.level == 0 else []
            if node.level > depth + 1:
                yield node.lineno, f"a relative import that leaves sched/: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute):
            modules = []
            owner, dotted = name_of(node.value), ".".join(name_of(node).split(".")[-2:])
            if dotted in CALLS or node.attr in THREADS:
                yield node.lineno, f"{name_of(node)}: time comes from Executor.now, threads are the executor's business"
            if node.attr == "time" and owner.split(".")[-1].endswith("loop"):
                yield node.lineno, f"{name_of(node)}: the only clock is Executor.now"
        else:
            continue
        for module in modules:
            if module.partition(".")[0] not in ALLOWED:
                yield (
                    node.lineno,
                    f"import of {module}: only numpy and the standard library without its clocks and threads",
                )


def main(root: Path) -> int:
    bad = 0
    for path in sorted((root / "sched").rglob("*.py")):
        inside = path.relative_to(root / "sched")
        for line, fault in faults(ast.parse(path.read_text(encoding="utf-8"), str(path)), len(inside.parts) - 1):
            print(f"sched/{inside}:{line}: {fault}")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
