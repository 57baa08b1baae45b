"""Starts of whole servers that are ended: by a signal or a failure, with what waits answered and no process left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path

import httpx
import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.fleet import processes
from jaxserve.fleet.messages import Failure
from jaxserve.fleet.processes import EngineOrders, EngineProcess
from jaxserve.report.start import StartProgress
from jaxserve.wire.address import Address, Place
from tests.support.server.processes import JOIN, alive, children
from tests.support.timing import until

# An engine that never is ready, in this process or another, or that fails as soon as the file FAIL exists.
SCRIPT = """
import sys, threading, time
from pathlib import Path
from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.cli.main import dispatch
from jaxserve.cli import serve
from jaxserve.fleet.supervisor import Engines
from jaxserve.report.start import WARMING, StartProgress
from jaxserve.server import main

fail = Path(sys.argv[1])

def start_service(config, told):
    told(3, 9, "draw 8")
    while not fail.exists():
        time.sleep(0.01)
    raise InvalidValue("no such weights", "model")

class Never(Engines):
    progress = StartProgress(WARMING, 3, 9)

    def __init__(self, config):
        super().__init__(1)

    def wait(self):
        while not fail.exists() and not self.closing.is_set():
            time.sleep(0.01)
        raise JaxserveError("the engine's process ended while it started (signal SIGKILL)")

main.start_service = start_service
slow = {"jax", "transformers"} & set(sys.modules)
assert not slow, f"{slow} are imported before the port opens"
if __name__ == "__main__":  # not in fronts, which import this file
    serve.serve = lambda config: main.run(config, Never)
    sys.exit(dispatch("serve", ["--port", "0", *sys.argv[2:]]))
"""


class Begun:
    """A server that starts, with a request that waits."""

    def __init__(self, process: subprocess.Popen[str], url: str, said: str, fail: Path) -> None:
        self.process, self.url, self.said, self._fail = process, url, said, fail
        self.answers: list[httpx.Response] = []
        self._asking = threading.Thread(target=self._ask, daemon=True)
        self._asking.start()

    def _ask(self) -> None:
        with suppress(httpx.TransportError):
            self.answers.append(
                httpx.post(f"{self.url}/v1/completions", json={"prompt": "a"}, timeout=JOIN, verify=False)
            )

    def get(self, path: str) -> httpx.Response:
        """Ask over a connection of its own. verify: otherwise certificates are read for each."""
        return httpx.get(f"{self.url}{path}", timeout=JOIN, verify=False)

    def fail(self) -> None:
        self._fail.touch()

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit status and stderr."""
        _, errors = self.process.communicate(timeout=JOIN)
        self._asking.join(JOIN)
        return self.process.returncode, errors


@contextmanager
def begun(folder: Path, *flags: str) -> Iterator[Begun]:
    script, fail = folder / "script.py", folder / "fail"
    script.write_text(SCRIPT)
    environment = {**os.environ, "JAXSERVE_CACHE_DIR": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, str(script), str(fail), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        opens = re.match(r"jaxserve opens (http://127\.0\.0\.1:\d+) now; ", said)
        assert opens is not None, said + process.stderr.read()
        yield Begun(process, opens[1], said, fail)
    finally:
        process.kill()
        process.communicate()


FRONTS = [("--api-server-count", count) for count in ("0", "1", "2")]


def state(one: Begun) -> None:
    """Check that every front knows how far the start is, and that a request waits."""
    until(lambda: "warming up, 3 of 9 programs" in one.get("/health").json()["error"]["message"])
    until(lambda: one.get("/health").json()["startup"]["requests_waiting"] == 1)
    assert one.get("/livez").status_code == 200
    assert not one.answers


@pytest.mark.parametrize(
    ("flags", "number"), [*zip(FRONTS, (signal.SIGINT, signal.SIGTERM, signal.SIGTERM), strict=True)]
)
def test_a_signal_ends_the_start(flags: tuple[str, str], number: signal.Signals, tmp_path: Path) -> None:
    with begun(tmp_path, *flags) as one:
        assert "the first start of this configuration" in one.said
        state(one)
        left = children(one.process.pid)
        assert len(left) == {"0": 0, "1": 0, "2": 2}[flags[1]]
        one.process.send_signal(number)
        status, errors = one.end()
    assert status == 128 + number and "Traceback" not in errors, errors
    assert [answer.status_code for answer in one.answers] == [503]
    assert one.answers[0].json()["error"]["code"] == "shutting_down"
    assert not any(map(alive, left))


@pytest.mark.parametrize("flags", FRONTS)
def test_a_failed_start_ends_the_server(flags: tuple[str, str], tmp_path: Path) -> None:
    with begun(tmp_path, *flags) as one:
        state(one)
        left = children(one.process.pid)
        one.fail()
        status, errors = one.end()
    here = flags[1] == "0"
    message = "no such weights" if here else "the engine's process ended while it started (signal SIGKILL)"
    assert status == (2 if here else 1) and f"jaxserve serve: error: {message}" in errors, errors
    assert "Traceback" not in errors
    assert [answer.status_code for answer in one.answers] == [503]
    assert one.answers[0].json()["error"]["code"] == "start_failed"
    assert not any(map(alive, left))


def test_a_front_that_dies_is_replaced_by_one_that_waits(tmp_path: Path) -> None:
    with begun(tmp_path, "--api-server-count", "2") as one:
        state(one)
        before = set(children(one.process.pid))
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        until(lambda: len(set(children(one.process.pid)) - before) == 1)
        for _ in range(20):  # over connections of their own, so to both fronts
            until(lambda: "warming up, 3 of 9" in one.get("/health").text)
        one.process.send_signal(signal.SIGINT)
        assert one.end()[0] == 128 + signal.SIGINT


def test_an_engine_that_is_not_ready_ends_at_once(tmp_path: Path) -> None:
    place = Place(Address(path=str(tmp_path / "socket")), b"key", "the engine process")
    process = EngineProcess()
    process.begin(EngineOrders(ServeConfig.load(), place))
    failures: list[JaxserveError] = []

    def start() -> None:
        try:
            process.wait()
        except JaxserveError as error:
            failures.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert process.close(), "it need not be asked, so it was not killed for being late"
    starting.join(JOIN)
    assert process.end == "signal SIGKILL" and "ended while it started (signal SIGKILL)" in str(failures[0])


def test_an_engine_tells_its_progress_until_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "TELLING", 3600.0)
    ours, theirs = Pipe()
    parent = processes._Parent(theirs)
    for progress in (StartProgress(done=1, total=3), StartProgress(done=2, total=3), StartProgress(done=3, total=3)):
        parent.tell(progress)
    parent.end(None)
    parent.tell(StartProgress(done=1, total=1))
    theirs.close()
    told: list[StartProgress] = []
    process = EngineProcess.__new__(EngineProcess)
    process._control = ours
    process.wait(told.append)
    assert [one.done for one in told] == [1, 3], "not too often, but the last one"
    with pytest.raises(EOFError):
        ours.recv()


def test_an_engine_that_fails_says_why_after_its_progress() -> None:
    ours, theirs = Pipe()
    parent = processes._Parent(theirs)
    parent.tell(StartProgress(done=1, total=3))
    parent.end(Failure.of(JaxserveError("no room")))
    process = EngineProcess.__new__(EngineProcess)
    process._control = ours
    process.close = lambda: True  # type: ignore[method-assign]
    with pytest.raises(JaxserveError, match="no room"):
        process.wait()
