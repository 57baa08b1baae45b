"""Check that `sched/` imports only the standard library and numpy, and uses no clock, socket or thread.

`Executor.now` is its only clock, so that the code runs the same in real and in virtual time. import-linter checks
imports between packages; this checks every import statement of the folder, and calls that read the time by other means.
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
    """Return the dotted name of an expression, or "": `asyncio.get_running_loop()` -> asyncio.get_running_loop."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return name_of(node.func)
    return ""


def faults(tree: ast.Module, depth: int) -> Iterator[tuple[int, str]]:
    """Yield (line, fault) for a file `depth` folders below `sched/`."""
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
                yield node.lineno, f"{name_of(node)}: sched/ takes the time from Executor.now and starts no threads"
            if node.attr == "time" and owner.split(".")[-1].endswith("loop"):
                yield node.lineno, f"{name_of(node)}: the only clock is Executor.now"
        else:
            continue
        for module in modules:
            if module.partition(".")[0] not in ALLOWED:
                yield (
                    node.lineno,
                    f"import of {module}: allowed are numpy, and the standard library without clocks and threads",
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
