"""Open-loop load: every call is sent at its time, independently of earlier calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

from jaxserve.bench.client import Outcome, Sender
from jaxserve.bench.load import Call

Progress = Callable[..., None]  # (done, total)

NOT_SENT = "not sent: the request before it in its session failed"


@dataclass(frozen=True, slots=True)
class Run:
    """Outcomes in the order of the calls, and the seconds from the run's start to its last token.

    left: calls without an outcome, because the run was stopped.
    """

    outcomes: tuple[Outcome, ...]
    duration: float
    left: int = 0


async def drive(
    calls: Sequence[Call],
    sender: Sender,
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Send all calls, ordered by `at`, and wait for them, or until `stop` is set: then those under way are given up.

    A call `after` another is sent when that one has its answer; if it failed, the call fails without being sent.
    With max_concurrency, a call waits here until another one ends; the wait counts as `lag`, not as
    TTFT.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    done = 0
    began = perf_counter()

    async def send_call(call: Call, before: asyncio.Task[Outcome] | None) -> Outcome:
        nonlocal done
        failed = False
        if before is not None:
            last = await before
            call, failed = _next_turn(call, last, perf_counter() - began), not last.ok
        if failed:
            outcome = Outcome(call, call.at, error=NOT_SENT)
        else:
            if before is not None:
                await asyncio.sleep(call.delay)
            async with gate:
                outcome = await sender.send(call, began)
        done += 1
        if progress is not None:
            progress(done, len(calls))
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []

    async def send_all() -> None:
        for call in calls:
            wait = began + call.at - perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            before = None if call.after is None else tasks[call.after]
            tasks.append(asyncio.create_task(send_call(call, before)))
        await asyncio.gather(*tasks)

    sending = asyncio.create_task(send_all())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (sending, stopping, *tasks):
            task.cancel()
        await asyncio.gather(sending, stopping, *tasks, return_exceptions=True)
    if not sending.cancelled():
        sending.result()
    outcomes = tuple(task.result() for task in tasks if not task.cancelled())
    return Run(outcomes, max(perf_counter() - began, 1e-9), len(calls) - len(outcomes))


def _next_turn(call: Call, before: Outcome, now: float) -> Call:
    """Return a call with its time and the conversation before it."""
    history = call.history
    if call.grows and isinstance(before.call.prompt, str):
        history = (*before.call.history, ("user", before.call.prompt), ("assistant", before.text))
    return replace(call, at=now + call.delay, history=history)


@dataclass(frozen=True, slots=True)
class Probe:
    """A tried rate. `attainment` is the share of requests that met their objectives."""

    rate: float
    attainment: float


async def find_goodput(
    measure: Callable[[float], Awaitable[float]],
    *,
    start: float,
    target: float = 0.9,
    precision: float = 0.05,
    most: int = 12,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[float, list[Probe]]:
    """Find the highest rate at which at least `target` of the requests are on time.

    Returns the rate, 0 if no rate reached the target, and all probes. `measure` returns the attainment
    at a rate. The rate is doubled (or halved) until the answer is enclosed, then bisected
    geometrically to within `precision`, with at most `most` probes. stopped: whether the last rate was not measured
    to its end; the search ends without it.
    """
    probes: list[Probe] = []
    low, high = 0.0, float("inf")
    rate = start
    while len(probes) < most and high > low * (1 + precision):
        attainment = await measure(rate)
        if stopped():
            break
        probes.append(Probe(rate, attainment))
        if probes[-1].attainment >= target:
            low = max(low, rate)
        else:
            high = min(high, rate)
        if low == 0.0:
            rate = high / 2
        elif high == float("inf"):
            rate = low * 2
        else:
            rate = (low * high) ** 0.5
    return low, probes
