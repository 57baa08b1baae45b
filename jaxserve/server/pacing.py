"""Token pacing (Kairos): what was computed ahead of its deadline is told at the promised pace, and never later.

A scheduler that lets a request run ahead makes text come in bursts. Paced, a token that is ready early waits for its
turn; one that is late is told at once, so a request that falls behind uses up what it was ahead. The engine never
knows: only what is already computed waits, here.
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
    """When each token of one output is told. Pure: times are in seconds on the caller's clock.

    Token k (0 is the first) is told at max(ready_k, ready_0 + k * tpot), where a stage of its own pace adds its own
    tpot, a tighter `tbt` wins over it, and without an objective nothing waits.
    """

    def __init__(self, slo: SLO, thinking: ThinkingEnd | None = None) -> None:
        """`thinking` finds where the answer begins; None where the output begins with the answer."""
        self._slo = slo
        self._thinking = thinking if slo.stages else None
        self._first: float | None = None  # when the first token was ready, which is when it was told
        self._budget = 0.0  # seconds of pace given to the tokens after it
        self._gap = self._gap_of(ANSWER if self._thinking is None else THINKING)

    def _gap_of(self, stage: str) -> float:
        gap = self._slo.tpot_of(stage)
        if self._slo.tbt is not None:
            gap = min(gap, self._slo.tbt)
        return 0.0 if isinf(gap) else gap

    def due(self, ready: float, tokens: Sequence[int]) -> float:
        """When the next tokens, all ready at `ready`, are told: with none, when those before them are."""
        for token in tokens:
            if self._first is None:
                self._first = ready
            else:
                self._budget += self._gap
            if self._thinking is not None and self._thinking.feed(token):
                self._thinking, self._gap = None, self._gap_of(ANSWER)
        return ready if self._first is None else max(ready, self._first + self._budget)


async def paced(
    source: AsyncGenerator[T, None],
    due: Callable[[float, T], float],
    *,
    hurry: Callable[[], bool] = lambda: False,
    held: Callable[[float], None] = lambda seconds: None,
) -> AsyncGenerator[T, None]:
    """The items of `source`, each at `due(ready, item)` on the loop's clock, which grows along each output.

    The source is read on while items wait. Where it fails, or once `hurry()` is true, what waits is told at once.
    `held` hears how long each item waited. Closing the iterator closes the source.
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
            rest = max(0.0, waiting[0][0] - clock()) if waiting else None
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
