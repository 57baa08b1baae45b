"""KV transfers: only computed KV arrives, in its own pages, and late or failing ones lose nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.plan import KVBuffer
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.cluster.kv_transfer import KVTransfer, KVTransferManager
from jaxserve.sched.instance.kv_manager import Reservation
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.instance.watchdog import PATIENT
from tests.support.examples import examples
from tests.support.sched.cases import JOBS, POLICIES, ROUTERS, SHAPE
from tests.support.sched.complete import ROLES
from tests.support.sched.harness import LIMIT, Flaky, Job, simulate
from tests.support.sched.laws import check_laws
from tests.support.sched.roles import ROLE_CHANGES, SEVERAL, RoleChanges

WRONG: list[str] = []  # violations, since an exception would be taken for a failed transfer


class Pool(Scheduler):
    """A block pool that records the pages with received KV."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.arrived: set[int] = set()

    def reserve(self, request: Request) -> Reservation | None:
        made = super().reserve(request)
        if made is not None:
            self.arrived.difference_update(made.pages[made.cached :])
        return made

    def accept(self, request: Request, *args: Any) -> None:
        reservation = self._reservations[request.id]
        missing = set(reservation.pages[reservation.cached :]) - self.arrived
        assert not missing, f"request {request} is accepted without the KV of pages {missing}"
        super().accept(request, *args)

    def write(self, pages: Sequence[int]) -> None:
        """Record that KV has arrived in these pages."""
        named = [page for page in pages if page in self.blocks._digest]
        if named:
            WRONG.append(f"KV lands in pages {named}, which others find in the prefix cache")
        self.arrived.update(pages)


def watch(patch: pytest.MonkeyPatch) -> type[Pool]:
    """Watch every transfer and return the scheduler class that a simulation must use."""
    pools: list[Pool] = []
    executors: list[Flaky] = []  # each is created after its scheduler

    class Noted(Pool):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            pools.append(self)

    make, carry, send = Flaky.__init__, Flaky.import_kv, KVTransferManager._send

    def noted(executor: Flaky, *args: Any, **more: Any) -> None:
        make(executor, *args, **more)
        executors.append(executor)

    async def imported(executor: Flaky, kv_buffer: KVBuffer, pages: Sequence[int]) -> None:
        await carry(executor, kv_buffer, pages)
        pools[executors.index(executor)].write(pages)

    async def sent(
        kv_transfers: KVTransferManager, transfer: KVTransfer, target: Any, reservation: Reservation, ready: int
    ) -> None:
        full = transfer.settled // target.executor.page_size
        assert transfer.complete or ready <= full, f"{ready} pages are sent, but only {full} are computed"
        await send(kv_transfers, transfer, target, reservation, ready)

    patch.setattr(Flaky, "__init__", noted)
    patch.setattr(Flaky, "import_kv", imported)
    patch.setattr(KVTransferManager, "_send", sent)
    return Noted


@pytest.mark.parametrize("roles", ["2x1", "4x1"])
@pytest.mark.parametrize("routing", ["least_work", "least_work:write_back"])
@pytest.mark.parametrize("loses", [0.0, 0.2])
@pytest.mark.parametrize("late", [0.0, 0.2])
def test_kv_arrives_complete_and_in_its_own_pages(
    roles: str, routing: str, loses: float, late: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 6 tokens, pages of 4, and conversations with shared prefixes."""
    WRONG.clear()
    draw = random.Random(3)
    jobs = []
    for talk in range(6):
        first = list(range(100 * talk, 100 * talk + draw.randint(9, 23)))
        jobs.append(Job(first, 9, 0.003 * talk))
        jobs.append(Job([*first, *[1] * 8, 7, 7, 7], 5, 1.0 + 0.003 * talk))
    outcome = simulate(
        jobs,
        ROLES[roles],
        tokens=6,
        pages=40,
        routing=routing,
        loses=lambda: draw.random() < loses,
        slow=lambda: 100.0 * (draw.random() < late),
        rest=200.0,
        scheduler=watch(monkeypatch),
    )
    assert WRONG == []
    assert [len(request.output) for request in outcome.requests] == [job.output for job in jobs]


P, D = Role.PREFILL, Role.DECODE
MOST = PATIENT.seconds
DELAYS = st.lists(st.sampled_from([0.0, 0.002, 1.0, MOST - 1, MOST + 1, 900.0, 1e4]), min_size=1, max_size=6)
FAILURES = st.lists(st.booleans(), min_size=1, max_size=6)


@settings(max_examples=examples(120))
@given(
    policy=st.sampled_from(POLICIES),
    mesh=st.sampled_from(sorted(SEVERAL)),
    routing=st.sampled_from(ROUTERS),
    jobs=JOBS,
    shape=SHAPE,
    delays=DELAYS,
    failures=st.one_of(st.just([False]), FAILURES),
    changes=st.one_of(st.just([]), ROLE_CHANGES),
)
def test_no_delay_or_failure_of_a_transfer_changes_a_token(
    policy: str,
    mesh: str,
    routing: str,
    jobs: list[Job],
    shape: dict[str, Any],
    delays: list[float],
    failures: list[bool],
    changes: RoleChanges,
) -> None:
    """Every request gets all its tokens, whatever the transfers to any instance take, and equal runs are equal."""

    def faults() -> dict[str, Any]:
        slow, loses = cycle(delays), cycle(failures)
        return {"slow": lambda: next(slow), "loses": lambda: next(loses), "rest": LIMIT}

    check_laws(policy, (mesh, routing, "none"), jobs, shape, changes=changes, faults=faults)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize(("fault", "wait"), [({"slow": lambda: 1e4}, MOST), ({"loses": lambda: True}, 1.0)])
def test_requests_decode_in_place_if_no_transfer_arrives(fault: dict[str, Any], wait: float, first_token: str) -> None:
    """Each waits for one transfer. The pool of the decode instance has room for the pages of two."""
    jobs = [Job(range(100 * index, 100 * index + 12), 9, 200.0 * index) for index in range(6)]
    outcome = simulate(jobs, (P, D), pages=8, first_token=first_token, **fault)
    for request in outcome.requests:
        assert request.finish_reason == "stop" and len(request.output) == 9
        assert request.token_times[-1] - request.arrival < wait + 1.0
    assert {name for name, plan in outcome.plans if plan.spans} == {"prefill0"}
