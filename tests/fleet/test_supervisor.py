"""Keepers: an engine runs as long as it is wanted, whatever ends it, and its devices are given back else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.errors import JaxserveError
from jaxserve.fleet.supervisor import Engines
from jaxserve.sched.scaling.changes import Standing
from jaxserve.wire.address import Address, Place
from tests.support.timing import until


class Fake:
    """A Replica that runs until told otherwise."""

    def __init__(self, at: int) -> None:
        self.place = Place(Address(path=f"/{at}"), b"", f"replica {at}")
        self.calls = list[str]()
        self.failures: list[str] = []
        self.end: str | None = None

    def start(self, closing: Callable[[], bool]) -> None:
        self.end = None
        if self.failures:
            raise JaxserveError(self.failures.pop())
        self.calls.append("start")

    def ended(self, closing: Callable[[], bool]) -> str | None:
        while self.end is None and not closing():
            time.sleep(0.002)
        return self.end

    def stop(self, *, keep: bool) -> None:
        self.calls.append("stop for a start" if keep else "stop")

    def close(self) -> bool:
        self.calls.append("close")
        return True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("jaxserve.fleet.supervisor.PAUSES", (0.0, 0.02))
    made = Engines(1)
    made._keep([Fake(0), Fake(1)])
    made.wait()
    yield made
    assert made.close() and [one.calls[-1] for one in made.replicas] == ["close"] * 2


def test_an_engine_starts_and_stops_as_wanted(engines: Any) -> None:
    (_, keeper), fake = engines.keepers, engines.replicas[1]
    assert [one.standing for one in engines.keepers] == [Standing.SERVING, Standing.STOPPED]
    keeper.want(True)
    assert keeper.standing in (Standing.STARTING, Standing.SERVING)
    until(lambda: keeper.standing is Standing.SERVING)
    keeper.want(False)
    assert keeper.standing is Standing.DRAINING
    fake.end = ""
    until(lambda: keeper.standing is Standing.STOPPED)
    assert fake.calls == ["start", "stop"] and engines.replicas[0].calls == ["start"]


def test_one_that_ends_or_is_wanted_again_while_it_drains_starts_again(engines: Any) -> None:
    keeper, fake = engines.keepers[0], engines.replicas[0]
    fake.end = "signal SIGKILL"
    until(lambda: fake.calls.count("start") == 2 and keeper.ready)
    keeper.want(False)
    keeper.want(True)
    fake.end = ""
    until(lambda: fake.calls.count("start") == 3 and keeper.ready)
    assert "stop" not in fake.calls


def test_a_start_that_fails_is_repeated_as_long_as_it_is_wanted(engines: Any) -> None:
    keeper, fake = engines.keepers[1], engines.replicas[1]
    fake.failures = ["no device is left"] * 3
    keeper.want(True)
    until(lambda: keeper.failure == "no device is left")
    assert keeper.standing is Standing.STARTING
    until(lambda: keeper.ready)
    assert keeper.failure is None and not fake.failures
    keeper.want(False)
    fake.failures, fake.end = ["no device is left"] * 1000, "exit status 1"
    until(lambda: keeper.standing is Standing.STOPPED)
    keeper.want(True)
    until(lambda: keeper.failure is not None)
    keeper.want(False)
    until(lambda: keeper.standing is Standing.STOPPED)
    assert threading.active_count() and engines.keepers[0].ready
