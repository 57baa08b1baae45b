"""A process of an engine that hangs is killed, so that it starts again."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import ServeConfig
from jaxserve.fleet import processes
from jaxserve.fleet.processes import EngineOrders, LocalReplica
from jaxserve.wire.address import Address, Place
from tests.support import hanging


def test_a_process_that_hangs_is_killed(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repo))  # a spawned process gets the path of this one
    monkeypatch.setattr(processes, "_serve", hanging.serve)
    monkeypatch.setattr(processes, "POLL", 0.02)
    monkeypatch.setattr(processes, "HUNG", 60)
    place = Place(Address(path=str(tmp_path / "socket")), b"key", "replica 0")
    replica = LocalReplica(EngineOrders(ServeConfig(), place))
    replica.start(lambda: False)
    process = replica.launch()
    looks = [process.look() for _ in range(hanging.BEATS + processes.HUNG)]
    assert not any(looks), "a process that gives signs of life is not killed"
    assert replica.ended(lambda: False) == "it had not responded for 1.2 s"
    assert process.join()
    replica.stop(keep=True)
