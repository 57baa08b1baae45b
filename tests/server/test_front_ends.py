"""Fronts that end are replaced, later each time; a server whose fronts cannot serve ends with the reason."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.report.start import StartProgress
from jaxserve.server import fronts
from jaxserve.server.fronts import UNSERVED, Fronts
from jaxserve.wire.address import Place
from tests.support.server import crashing

Ends = Callable[..., list[int]]


class Ready:
    """Engines that are ready at once."""

    progress = StartProgress()

    def run(self) -> tuple[Place, ...]:
        return ()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, repo: Path) -> Ends:
    """Run two fronts, and return the failures in a row before each new start; `enough` of them end the server."""
    failures: list[int] = []
    forked: Any = multiprocessing.get_context("forkserver")  # `spawn` would import everything for each front
    forked.set_forkserver_preload([fronts.__name__, crashing.__name__])

    def run(front: Any, enough: int = 1000) -> list[int]:
        def pause(count: int) -> float:
            failures.append(count)
            if count == enough:
                os.kill(os.getpid(), signal.SIGTERM)
            return 0.0

        monkeypatch.setattr(fronts, "pause", pause)
        monkeypatch.setattr(fronts, "_front", front)
        monkeypatch.setattr(multiprocessing, "get_context", lambda kind: forked)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            beside: Any = Ready()
            made = Fronts(ServeConfig.load(api_server_count=2), beside, sock)
            monkeypatch.syspath_prepend(str(repo))  # for the processes, which import `tests`
            assert made.run() == 0
        return failures

    assert threading.current_thread() is threading.main_thread()
    return run


def test_a_front_that_cannot_start_ends_the_server_with_its_reason(ran: Ends) -> None:
    with pytest.raises(InvalidValue, match="no tokenizer") as error:
        ran(crashing.refuse)
    assert error.value.param == "tokenizer"


def test_fronts_that_die_before_they_serve_end_the_server(ran: Ends) -> None:
    with pytest.raises(JaxserveError, match=rf"^{UNSERVED} fronts ended before they served; the last: .* status 9$"):
        ran(crashing.die)


@pytest.mark.parametrize("front", [crashing.serve_and_die, crashing.die_beside_another])
def test_a_front_that_dies_again_and_again_starts_later_each_time(ran: Ends, front: Any) -> None:
    """As long as a front serves, or has served, the server goes on."""
    failures = ran(front, enough=UNSERVED + 1)
    assert sorted(set(failures)) == [*range(1, UNSERVED + 2)]
