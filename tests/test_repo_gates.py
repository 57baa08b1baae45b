"""The gates in scripts/ find violations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("path", "text", "status", "found"),
    [
        ("sched/a.py", "x = 1\n" * 500, 0, None),
        ("sched/a.py", "x = 1\n" * 800, 0, "warning: sched/a.py: 800 lines, above 500 is long"),
        ("tests/test_a.py", "x = 1\n" * 801, 1, "tests/test_a.py: 801 lines, the limit is 800"),
        ("jaxserve/a.py", function("f", 60), 0, None),
        ("jaxserve/a.py", function("f", 100), 0, "warning: jaxserve/a.py:1: f has 100 lines, above 60 is long"),
        ("jaxserve/a.py", function("not_a_kernel", 101), 1, "a.py:1: not_a_kernel has 101 lines, the limit is 100"),
        ("pallas_kernels/a.py", function("_decode_kernel", 150), 0, "warning: "),
        ("pallas_kernels/a.py", function("_decode_kernel", 151), 1, "the limit is 150"),
        ("pallas_kernels/a.py", function("reference", 101), 1, "the limit is 100"),
    ],
)
def test_size_gate(
    load_file: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    path: str, text: str, status: int, found: str | None,
) -> None:  # fmt: skip
    write(tmp_path, path, text)
    assert load_file("scripts/size_gate.py").main(tmp_path) == status
    out = capsys.readouterr().out
    assert out.startswith("warning: ") == (found is not None and status == 0)
    assert out == "" if found is None else found in out


def test_the_size_gate_reads_linked_files_once(
    load_file: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "sched/a.py", "x = 1\n" * 801)
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve/sched").symlink_to("../sched")
    assert load_file("scripts/size_gate.py").main(tmp_path) == 1
    assert capsys.readouterr().out.count("\n") == 1


REFUSED = (
    "import time", "from time import monotonic", "import socket", "from concurrent.futures import ThreadPoolExecutor",
    "import jax", "from jaxserve.engine import engine", "from ... import engine", "import sched",
    "now = asyncio.get_running_loop().time()", "now = self._loop.time()", "now = datetime.datetime.now()",
    "loop.run_in_executor(None, f)", "asyncio.to_thread(f)",
)  # fmt: skip
ALLOWED = (
    "import asyncio, heapq, json, math", "from collections.abc import Sequence", "from ..policy import View",
    "from . import fcfs", "now = executor.now()", "step_time = table.time", "def time(self): return self.now",
)  # fmt: skip


@pytest.mark.parametrize(("lines", "refused"), [(REFUSED, True), (ALLOWED, False)], ids=["refused", "allowed"])
def test_sched_gate(
    load_file: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    lines: tuple[str, ...], refused: bool,
) -> None:  # fmt: skip
    main = load_file("scripts/sched_gate.py").main
    for line in lines:
        write(tmp_path, "sched/policies/a.py", f"import asyncio\nimport datetime\n{line}\n")
        assert main(tmp_path) == int(refused), line
        assert capsys.readouterr().out.startswith("sched/policies/a.py:3: ") is refused
