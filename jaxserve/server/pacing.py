"""Token pacing (Kairos): hold back tokens that are computed ahead of their deadline.

A scheduler that lets a request run ahead of its deadlines produces text in bursts. With pacing, a
token that is ready early is sent at its deadline, and a late token is sent at once, so a request that
falls behind uses up its lead. The engine does not know about pacing: only computed tokens are delayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import isinf
from typing import TypeVar

from jaxserve.sched.api.slo import ANSWER, SLO, THINKING
from jaxserve.sched.api.thinking import ThinkingEnd

T = TypeVar("T")


class Pace:
    """The send times of one output's tokens, in seconds on the caller's clock.

    Token k (0 is the first) is sent at max(ready_k, ready_0 + k * tpot). Tokens of a stage with its own
    objective count with that stage's tpot; a tighter `tbt` replaces tpot; without an objective there
    is no delay.
    """

    def __init__(self, slo: SLO, thinking: ThinkingEnd | None = None) -> None:
        """Create the pace of one output.

        `thinking` detects the end of thinking; None if the output begins with the answer.
        """
        self._slo = slo
        self._thinking = thinking if slo.stages else None
        self._first: float | None = None  # when the first token was ready, and therefore sent
        self._budget = 0.0  # seconds from the first token to the deadline of the latest
        self._gap = self._gap_of(ANSWER if self._thinking is None else THINKING)

    def _gap_of(self, stage: str) -> float:
        gap = self._slo.tpot_of(stage)
        if self._slo.tbt is not None:
            gap = min(gap, self._slo.tbt)
        return 0.0 if isinf(gap) else gap

    def due(self, ready: float, tokens: Sequence[int]) -> float:
        """Return the send time of the next tokens, all of which were ready at `ready`.

        Without tokens, return that of the tokens before.
        """
        for token in tokens:
            if self._first is None:
                self._first = ready
            else:
                self._budget += self._gap
            if self._thinking is not None and self._thinking.feed(token):
                self._thinking, self._gap = None, self._gap_of(ANSWER)
        return ready if self._first is None else max(ready, self._first + self._budget)


GLANCE = 0.5  # seconds after which an item that waits asks again whether there is a hurry


async def paced(
    source: AsyncGenerator[T, None],
    due: Callable[[float, T], float],
    *,
    hurry: Callable[[], bool] = lambda: False,
    held: Callable[[float], None] = lambda seconds: None,
) -> AsyncGenerator[T, None]:
    """Yield the items of `source`, each at `due(ready, item)` on the event loop's clock.

    `due` must not decrease along an output. The source is read while items wait. If it fails, or once
    `hurry()` is true, waiting items are yielded at once. `held` is called with the seconds that each
    item waited. Closing the iterator closes the source.
    """
    clock, order = asyncio.get_running_loop().time, count()
    waiting: list[tuple[float, int, float, T]] = []  # a heap: (due, order of arrival, ready, item)
    coming: asyncio.Task[T] | None = _next(source)
    failure: Exception | None = None
    try:
        while coming is not None or waiting:
            while waiting and (waiting[0][0] <= clock() or failure is not None or hurry()):
                _, _, ready, item = heappop(waiting)
                held(clock() - ready)
                yield item
            rest = min(max(0.0, waiting[0][0] - clock()), GLANCE) if waiting else None
            if coming is None:
                await asyncio.sleep(rest or 0.0)
                continue
            await asyncio.wait([coming], timeout=rest)
            if not coming.done():
                continue
            try:
                item = coming.result()
            except StopAsyncIteration:
                coming = None
            except Exception as error:
                coming, failure = None, error
            else:
                ready = clock()
                heappush(waiting, (due(ready, item), next(order), ready, item))
                coming = _next(source)
        if failure is not None:
            raise failure
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await source.aclose()


def _next(source: AsyncGenerator[T, None]) -> asyncio.Task[T]:
    async def step() -> T:
        return await anext(source)

    return asyncio.ensure_future(step())
