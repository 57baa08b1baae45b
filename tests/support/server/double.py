"""An engine double for tests that need failures, refusals or delays on demand."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable

from jaxserve.engine.runtime.flight_recorder import Recent, RequestLife
from jaxserve.engine.runtime.info import EngineInfo, InstanceInfo, InstanceStats, Stats
from jaxserve.errors import InvalidValue, JaxserveError, QueueFull
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.plan import Delta, TokenLogprobs
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.sched.instance.stats import Counters

BOUND = 1000  # requests that may run at the same time


class Double:
    """An engine double that repeats the prompt token by token from a thread per request."""

    def __init__(
        self, *, vocab_size: int = 4096, max_model_len: int = 256, delay: float = 0.0, bound: int = BOUND,
        eos: frozenset[int] = frozenset(),
    ):  # fmt: skip
        instance = InstanceInfo("i0", "mixed", ("cpu:0",), 64, 16)
        self.info = EngineInfo(
            model="double",
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            dtype="float32",
            instances=(instance,),
            policy="fcfs",
            routing="least_work",
            eos=eos,
            thinking=ThinkingMarkers(),
            startup_seconds=0.0,
            hidden_size=8,
        )
        self.delay = delay
        self.bound = bound
        self.healthy = True
        self.unlucky: int | None = 13  # the token of prompts that are refused
        self.fail_after: int | None = None  # tokens after which each request fails
        self.reject: str | None = None  # why each request is refused, before its first token
        self.writes: list[int] = []  # tokens of the outputs, instead of the prompt's
        self.submitted: list[Request] = []
        self.cancelled: dict[int, str] = {}
        self.history = Recent(0)  # what the flight recorder would have
        self.lives: dict[int, RequestLife] = {}  # likewise
        self._over: dict[int, Request] = {}
        self._running: set[int] = set()
        self._left: dict[int, threading.Event] = {}
        self._ids = itertools.count()
        self._counters = Counters()
        self._lock = threading.Lock()

    @property
    def usual(self) -> bool:
        """Whether requests end as they should: no test has asked for failures or delays."""
        return self.fail_after is self.reject is None and not (self.delay or self.writes) and self.bound == BOUND

    def submit(self, new: NewRequest, on_delta: Callable[[Delta], None]) -> int:
        """Accept a request."""
        with self._lock:
            if len(self._running) >= self.bound:
                raise QueueFull(f"{len(self._running)} requests wait", 2.0)
            if self.unlucky in new.prompt:
                raise InvalidValue(f"token {self.unlucky} is bad luck", "prompt")
            id = next(self._ids)
            self._running.add(id)
            self._left[id] = threading.Event()
        request = Request(id, new, time.monotonic() - new.waited, limit=1)
        self.submitted.append(request)
        threading.Thread(target=self._run, args=(request, on_delta), daemon=True).start()
        return id

    def _run(self, request: Request, tell: Callable[[Delta], None]) -> None:
        params, id, left = request.params, request.id, self._left[request.id]
        request.scheduled_at = time.monotonic()
        room = self.info.max_model_len - request.prompt_length
        for count, token in enumerate(self.writes or itertools.cycle(request.prompt), 1):
            if self.delay:
                left.wait(self.delay)  # a cancelled request ends at once
            else:
                time.sleep(0)  # lets the server's thread run, which an event's wait does not
            if id in self.cancelled or self.reject is not None or self.fail_after == count - 1:
                reason = self.cancelled.get(id, "rejected" if self.reject else "error")
                self._end(request, reason)
                why = {"rejected": self.reject, "error": "out of luck"}.get(reason)
                tell(Delta(id, finish_reason=reason, error=why))
                return
            request.output.append(token)
            request.token_times.append(time.monotonic())
            request.first_token_at = request.token_times[0]
            with self._lock:
                self._counters.generated_tokens += 1
            told = TokenLogprobs(token, -0.5, 1, ((token, -0.5), (token + 1, -1.5))[: params.logprobs or 0])
            logprobs = (told,) if params.logprobs is not None else ()
            stopped, done = token in params.stop_token_ids, count == len(self.writes)
            reason = "stop" if stopped or done else "length" if count >= min(params.max_tokens or room, room) else None
            if reason is not None:
                self._end(request, reason)
            scores = params.prompt_logprobs is not None and count == 1
            prompt = tuple(TokenLogprobs(one, -0.5, 1, ()) for one in request.prompt[1:]) if scores else ()
            tell(Delta(id, (token,), logprobs, prompt, reason, None, token if stopped else None))
            if reason is not None:
                return

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._over[request.id] = request
        with self._lock:
            self._running.discard(request.id)

    def check_outputs(self, prompts: int, n: int) -> None:
        if prompts * n > self.bound:
            raise InvalidValue(f"{prompts * n} outputs, and at most {self.bound} may wait", "n")

    def cancel(self, request: int, reason: str = "abort") -> None:
        self.cancelled.setdefault(request, reason)
        self._left[request].set()

    def record(self, request: int) -> RequestMetrics | None:
        found = self._over.get(request)
        return None if found is None else RequestMetrics.of(found)

    def release(self) -> None:
        """Let the requests that wait for `delay` go on without it."""
        for left in list(self._left.values()):
            left.set()

    def refusal(self, request: int) -> JaxserveError | None:
        return None

    async def refresh(self) -> None:
        """Do nothing: `stats` is of now."""

    async def recent(self, since: int) -> Recent:
        """Return what a test has recorded, after `since`."""
        events, requests = self.history.events, self.history.requests
        return self.history._replace(
            events=tuple(one for one in events if one.number > since),
            requests=tuple(one for one in requests if one.number > since),
        )

    async def life(self, id: int, client: str | None) -> RequestLife | None:
        found = self.lives.get(id)
        return found if found is not None and client in (None, found.client) else None

    def stats(self) -> Stats:
        running = len(self._running)
        reasons = Counter(one.finish_reason or "error" for one in list(self._over.values()))
        instance = InstanceStats("i0", "mixed", running, 0, 64, running, 0)
        return Stats((instance,), self._counters, 0, 0, 0.0, dict(reasons))

    @property
    def ailment(self) -> str | None:
        return None if self.healthy else "the engine has failed: see the server's log"

    def drain(self, timeout: float) -> bool:
        return True

    def close(self) -> bool:
        """Return True: nothing is left running."""
        return True
