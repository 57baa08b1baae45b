"""Requests without a seed: random from process to process, unless the server has a seed."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import InvalidValue
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.settings.seeds import request_seed

REQUESTS = 3


def of_engine(machine: Any, **given: Any) -> list[int]:
    """Return the seeds that an engine gives its first requests."""
    engine = Engine(ServeConfig.load(**given), machine)
    engine._loop.close()  # it has not started
    return [engine._seed_of(SamplingParams(), id) for id in range(REQUESTS)]


class Nowhere(Dispatcher):
    """A front's dispatcher that notes what it would send."""

    def __init__(self, seed: str) -> None:
        super().__init__(None, seed)  # type: ignore[arg-type]
        self.sent: list[int | None] = []

    def _instance(self, request: Any) -> int:
        return 0

    def _send(self, request: Any, instance: int) -> None:
        self.sent.append(request.asked.params.seed)


def of_front(machine: object, **given: Any) -> list[int | None]:
    """Return the seeds that a front gives its first requests."""
    front = Nowhere(request_seed(ServeConfig.load(**given).seed))
    for _ in range(REQUESTS):
        front.submit(NewRequest((1, 2), SamplingParams(), SLO()), lambda delta: None)
    return front.sent


@pytest.mark.parametrize("seeds", [of_engine, of_front])
def test_requests_without_a_seed_differ_between_processes_unless_the_server_has_one(seeds: Any, assembled: Any) -> None:
    machine = assembled("1x1")
    first, second = seeds(machine), seeds(machine)
    assert len({*first, *second}) == 2 * REQUESTS, "random, and each request has its own"
    given = seeds(machine, seed=7)
    assert given == seeds(machine, seed=7) != seeds(machine, seed=8) and len(set(given)) == REQUESTS


def test_a_negative_seed_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="seed=-1"):
        ServeConfig.load(seed=-1)
