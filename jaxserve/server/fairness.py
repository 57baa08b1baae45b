"""Admission in front of the engine: per-client limits, and deficit round robin among clients under overload.

Policies order the requests that are in the engine, and under overload those could mostly come from one
client. Therefore, with several API keys, at most `window` requests are in the engine, and the others
wait here in one queue per client. Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) selects
the next client: a request costs its number of outputs, and each round credits every waiting client
with its weight.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

from jaxserve.errors import InvalidValue, QueueFull
from jaxserve.server.failures import Refused
from jaxserve.server.limits import ClientLimits, ClientLimitsFile

BURST = 10.0  # seconds' worth of its token rate that a client may use at once

# When a request arrived that has waited for the server's start, by time.monotonic(); None: the request has not
# waited. Each request has a task, so a context, of its own.
arrived_at_start: ContextVar[float | None] = ContextVar("arrived_at_start", default=None)


class Client:
    """The requests and tokens of one client. Writer: its Stage."""

    def __init__(self, limits: ClientLimits, now: float) -> None:
        self.limits = limits
        self.inside = 0  # outputs in the engine
        self.queue: deque[tuple[int, asyncio.Future[None]]] = deque()  # (outputs, admission) of waiting requests
        self.deficit = 0.0
        self.requests = 0  # outputs admitted so far
        self.tokens: Counter[str] = Counter()  # by kind: prompt, generation
        self.refused: Counter[str] = Counter()  # by reason
        self._level = (limits.tokens_per_second or 0.0) * BURST  # tokens in the bucket; negative: overdrawn
        self._seen = now

    @property
    def waiting(self) -> int:
        """The number of outputs in the queue."""
        return sum(outputs for outputs, _ in self.queue)

    def fits(self, outputs: int) -> bool:
        most = self.limits.max_concurrency
        return most is None or self.inside + outputs <= most

    def wait_for_tokens(self, now: float) -> float:
        """Return the seconds until the token rate admits a request; 0.0 if it does now."""
        rate = self.limits.tokens_per_second
        if rate is None:
            return 0.0
        self._level = min(BURST * rate, self._level + (now - self._seen) * rate)
        self._seen = now
        return 0.0 if self._level > 0 else (1.0 - self._level) / rate

    def use(self, kind: str, tokens: int) -> None:
        """Count tokens. A running request may overdraw the rate, which delays later ones."""
        self.tokens[kind] += tokens
        self._level -= tokens


class Stage:
    """The admission of requests to the engine. Writer: the server's event loop."""

    def __init__(
        self,
        limits: ClientLimitsFile,
        names: tuple[str, ...],
        *,
        window: int,
        bound: int,
        timeout: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the queues of the clients `names`.

        window: outputs in the engine at a time if there are several clients.
        bound: outputs that may wait; each client may use an equal part even if others fill the queue.
        timeout: seconds after which a waiting request is refused.
        """
        self._now = now
        self.clients = {name: Client(limits.of(name), now()) for name in names or ("",)}
        self._window = window if len(self.clients) > 1 else None
        self._bound = bound
        self._timeout = timeout
        self._ring: deque[Client] = deque()  # clients with a queue

    def resize(self, window: int, bound: int) -> None:
        """Change both sizes, as engines join and leave."""
        self._window = window if len(self.clients) > 1 else None
        self._bound = bound
        self._serve()

    @asynccontextmanager
    async def admitted(self, name: str, outputs: int, prompt_tokens: int) -> AsyncGenerator[Client, None]:
        """Wait for admission; within the context the request is in the engine.

        Cancelling a waiting request removes it from the queue. Raises Refused, QueueFull or InvalidValue.
        """
        client = self.clients[name]
        try:
            self._check(client, outputs)
        except (Refused, QueueFull) as error:
            client.refused[str(getattr(error, "code", None) or "queue_full")] += 1
            raise
        if client.queue or not self._has_room(client, outputs):
            await self._queue(client, outputs)
        else:
            self._admit(client, outputs)
        client.use("prompt", prompt_tokens)
        try:
            yield client
        finally:
            client.inside -= outputs
            self._serve()

    def _check(self, client: Client, outputs: int) -> None:
        limits = client.limits
        if limits.max_concurrency is not None and outputs > limits.max_concurrency:
            most = f"this API key may run at most {limits.max_concurrency} at a time"
            raise InvalidValue(f"prompts times n is {outputs} outputs; {most}", "n")
        if (wait := client.wait_for_tokens(self._now())) > 0:
            text = f"this API key has used its {limits.tokens_per_second:g} tokens per second: try again later"
            raise Refused(429, text, code="token_rate", retry_after=wait)
        if not client.queue and self._has_room(client, outputs):
            return
        waiting = sum(client.waiting for client in self.clients.values()) + outputs
        if client.waiting + outputs > limits.queue_share * self._bound and limits.queue_share < 1:
            text = f"{client.waiting} requests of this API key wait; it may fill {limits.queue_share:.0%} of the queue"
            raise Refused(429, text, code="queue_share", retry_after=1.0)
        if waiting > self._bound and client.waiting + outputs > self._bound / len(self.clients):
            raise QueueFull(
                f"{waiting - outputs} requests wait for admission, the limit is {self._bound}: try again later"
            )

    def _has_room(self, client: Client, outputs: int) -> bool:
        """Return whether a request can be admitted.

        A request with many outputs may exceed the window, because otherwise it might never be admitted.
        """
        inside = sum(client.inside for client in self.clients.values())
        return client.fits(outputs) and (self._window is None or inside < self._window)

    def _admit(self, client: Client, outputs: int) -> None:
        client.inside += outputs
        client.requests += outputs

    async def _queue(self, client: Client, outputs: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        client.queue.append((outputs, turn))
        if client not in self._ring:
            self._ring.append(client)
        try:
            async with asyncio.timeout(self._timeout):  # `wait_for` of 3.11 can lose a simultaneous cancellation
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at the same time
                client.inside -= outputs
            elif (outputs, turn) in client.queue:
                client.queue.remove((outputs, turn))
            self._serve()
            if isinstance(error, TimeoutError):
                client.refused["queue_timeout"] += 1
                text = f"the request was not admitted within {self._timeout:g} s: try again later"
                raise Refused(503, text, code="queue_timeout", retry_after=1.0) from None
            raise

    def _serve(self) -> None:
        """Admit waiting requests while there is room."""
        while (client := self._next()) is not None:
            outputs, turn = client.queue.popleft()
            if turn.done():
                continue  # cancelled, but its task has not run yet
            client.deficit -= outputs
            self._admit(client, outputs)
            turn.set_result(None)

    def _next(self) -> Client | None:
        """Return the client to admit a request of next; None if no request can be admitted."""
        for client in list(self._ring):
            if not client.queue:
                client.deficit = 0.0  # clients without waiting requests must not save up credit
                self._ring.remove(client)
        able = [client for client in self._ring if self._has_room(client, client.queue[0][0])]
        if not able:
            return None
        missing = [(client.queue[0][0] - client.deficit) / client.limits.weight for client in able]
        if (rounds := math.ceil(min(missing))) > 0:  # no client has enough credit: skip the rounds without admission
            for client in able:
                client.deficit += rounds * client.limits.weight
        while True:
            client = self._ring[0]
            if client in able and client.deficit >= client.queue[0][0]:
                return client  # stays first in the ring until its credit is used up
            self._ring.rotate(-1)
