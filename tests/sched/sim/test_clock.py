"""Laws of virtual time: it never waits, never goes backward, orders ties, and never hangs."""

import asyncio

import pytest

from jaxserve.sched.api.errors import JaxserveError
from jaxserve.sched.sim import clock


def test_time_is_monotone_and_ties_keep_priority_then_order() -> None:
    seen: list[tuple[float, str]] = []

    async def main() -> None:
        loop = clock.loop()
        for when, priority, name in (
            (2.0, clock.EVENT, "c"),
            (1.0, clock.EVENT, "b1"),
            (1.0, clock.EVENT, "b2"),
            (1.0, clock.ARRIVAL, "a"),
            (-5.0, clock.EVENT, "past"),
        ):
            loop.at(when, priority, lambda name=name: seen.append((loop.time(), name)))
        await asyncio.sleep(3)

    clock.run(main())
    assert seen == [(0.0, "past"), (1.0, "a"), (1.0, "b1"), (1.0, "b2"), (2.0, "c")]


def test_a_woken_task_sees_all_events_of_its_time() -> None:
    async def main() -> list[str]:
        loop, events = clock.loop(), []
        wake: asyncio.Future[None] = loop.create_future()
        loop.call_at(1.0, wake.set_result, None)
        loop.call_at(1.0, events.append, "later in the same moment")
        await wake
        return list(events)

    assert clock.run(main()) == ["later in the same moment"]


def test_cancelled_timers_do_not_move_the_clock() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(100, print, "never").cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), timeout=5)
        return asyncio.get_running_loop().time()

    assert clock.run(main()) == 5


def test_deadlock_names_the_tasks_that_wait() -> None:
    async def stuck_forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck_forever(), name="core-7")

    with pytest.raises(clock.Deadlock, match=r"core-7 \(.*stuck_forever at stuck_forever:\d+\)"):
        clock.run(main())


def test_no_threads_and_no_other_loop() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(JaxserveError, match="needs a thread"):
        clock.run(main())

    async def elsewhere() -> None:
        clock.loop()

    with pytest.raises(JaxserveError, match="VirtualLoop"):
        asyncio.run(elsewhere())


def test_a_simulation_runs_inside_another_loop() -> None:
    """A cell of a notebook is called by the loop of its kernel."""

    async def inner() -> float:
        await asyncio.sleep(5.0)
        return clock.loop().now

    async def cell() -> tuple[float, bool]:
        loop, later = asyncio.get_running_loop(), asyncio.ensure_future(asyncio.sleep(0, "went on"))
        ended = clock.run(inner())
        with pytest.raises(clock.Deadlock):
            clock.run(asyncio.wait_for(asyncio.Event().wait(), None))
        return ended, asyncio.get_running_loop() is loop and await later == "went on"

    assert asyncio.run(cell()) == (5.0, True)
