"""scripts/walk records the files that a call enters, and the server's walk has the expected start and end."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def walk(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("scripts/walk.py")


FIRST = """
import second
class Service:
    def prepare(self):
        second.twice()
        return self.name()
    def name(self):
        return second.twice()
def start():
    return Service().prepare() + second.third.end()
async def wait(sleep):
    second.twice()
    await sleep(0)
    return second.twice()
"""
SECOND = """
import third
def once(): return 1
def twice(): return once() + once()
"""
THIRD = "def end(): return 1"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A tree of three files, with the first one imported."""
    for name, text in (("first", FIRST), ("second", SECOND), ("third", THIRD)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("second", "third"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location("first", tmp_path / "first.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("second", "third"):
        sys.modules.pop(name, None)


def recorded(walk: ModuleType, root: Path, work: Callable[[], object]) -> ModuleType:
    recorder = walk.Recorder(root.resolve())
    recorder.install()
    try:
        with recorder.recording():
            work()
    finally:
        recorder.uninstall()
    return recorder  # type: ignore[no-any-return]


def test_stays_and_returns_of_a_call(walk: ModuleType, tree: ModuleType, tmp_path: Path) -> None:
    found = recorded(walk, tmp_path, tree.start)
    (thread,) = found.walks.values()
    assert thread == ["first.py", "second.py", "first.py", "second.py", "third.py"]
    assert found.inside == thread[:-1], "until Service.prepare has returned"
    assert walk.counts(thread) == "5 stays in 3 files, 2 returns"
    assert [line.split() for line in walk.every_stay("a", thread)][3:] == [
        ["<", "first.py"],
        ["<", "second.py"],
        ["third.py"],
    ]
    assert [line.split()[0] for line in walk.every_file("a", thread)][1:] == ["2", "2", "1"]


def test_resumed_coroutines_and_other_threads(walk: ModuleType, tree: ModuleType, tmp_path: Path) -> None:
    def work() -> None:
        thread = threading.Thread(target=tree.start, name="worker_3")
        thread.start()
        thread.join()
        asyncio.run(tree.wait(asyncio.sleep))

    walks = recorded(walk, tmp_path, work).walks
    assert walks["MainThread"] == ["first.py", "second.py", "first.py", "second.py"]
    assert walks["worker"][-1] == "third.py"
    report = list(walk.report("both", walks, False))
    assert report[0] == "both: 9 stays in 3 files and 2 threads"


@pytest.mark.full
def test_the_walk_of_a_prompt(repo: Path) -> None:
    """In a process of its own, which imports the files of the checkout, whatever is installed."""
    out = subprocess.run([sys.executable, "scripts/walk.py", "prompt"], cwd=repo, capture_output=True, text=True).stdout
    assert out.startswith("LLM.generate: ")
    assert "thread MainThread: " in out and "jaxserve/llm.py" in out and "sched/instance/scheduler.py" in out


def test_an_unknown_walk_is_refused(walk: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        walk.main(["nothing"])
    assert "walk 'nothing' must be one of http, prompt" in capsys.readouterr().err
