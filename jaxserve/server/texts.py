"""Threads that render and tokenize prompts, so that a long text blocks neither the event loop nor other requests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SHORT = 32_768  # characters; one thread takes only texts up to this length, so they never wait for longer ones
COUNTED = 1 << 18  # values of which a text is counted: more of them are a long text anyway
PER_CHARACTER = 1e-6  # seconds; roughly the cost of encoding


class _Task:
    """A call and its result. Cancelling the caller drops `work`, and the text that it holds."""

    __slots__ = ("future", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work: Callable[[], Any] | None = work
        self.future: Future[Any] = Future()


class TextThreads:
    """A pool of threads that process texts, shortest first.

    A running call cannot be interrupted; a waiting one is dropped when its caller is cancelled. Calls
    are ordered by arrival time plus expected duration: among texts that arrive together the shortest
    runs first, and a long text is not delayed forever. The threads are daemons, so the process can
    exit while one of them works.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Start `threads` threads (at least 2). Default: half the cores, 2 to 8."""
        count = max(2, min(8, (os.cpu_count() or 2) // 2)) if threads is None else max(2, threads)
        self._ready = threading.Condition()
        self._order = itertools.count()
        self._queues: tuple[list[tuple[float, int, _Task]], ...] = ([], [])  # short, long
        self._closed = False
        for number in range(count):
            queues = self._queues[:1] if number == 0 else self._queues
            name = f"jaxserve-text-{number}"
            threading.Thread(target=self._work, args=(queues,), name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        """The number of calls that no thread has begun."""
        with self._ready:
            return sum(task.work is not None for queue in self._queues for _, _, task in queue)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work` on a thread and return its result. `size` is the number of characters that it reads."""
        task = _Task(work)
        key = time.monotonic() + size * PER_CHARACTER
        with self._ready:
            if self._closed:
                raise RuntimeError("the text threads are closed")
            heapq.heappush(self._queues[size > SHORT], (key, next(self._order), task))
            self._ready.notify_all()
        try:
            result: T = await asyncio.wrap_future(task.future)
            return result
        finally:
            task.work = None

    def close(self) -> None:
        """Drop waiting calls and stop the threads after the calls that they have begun."""
        with self._ready:
            self._closed = True
            for queue in self._queues:
                for _, _, task in queue:
                    task.future.cancel()
                queue.clear()
            self._ready.notify_all()

    def _work(self, queues: tuple[list[tuple[float, int, _Task]], ...]) -> None:
        while True:
            with self._ready:
                while not self._closed and not any(queues):
                    self._ready.wait()
                if self._closed:
                    return
                _, _, task = heapq.heappop(min((queue for queue in queues if queue), key=lambda queue: queue[0][:2]))
            work = task.work
            if work is None or not task.future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
            del work, task  # an idle thread must not keep a text alive


def size_of(*given: Any) -> int:
    """Return the number of characters in JSON values, each other value as one; at most COUNTED values are counted."""
    size, waiting = 0, list(given)
    for _ in range(COUNTED):
        if not waiting:
            break
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value)
            continue
        size += 1
        if isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value[:COUNTED]
    return size
