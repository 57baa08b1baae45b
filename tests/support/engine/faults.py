"""Small engines to break: recorded outcomes of requests, and devices that hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.assemble import Machine
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import Delta, StepPlan
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.instance.watchdog import Patience

SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "32MiB",
    "preempt_boundary": "chunk",
    "profile_time": 0.5,
}
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0.0)


class Starter:
    """A factory of engines on one machine's executors, one at a time. Call `end` after them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.engines: list[Engine] = []

    def __call__(self, patience: float = 30.0, **settings: Any) -> Engine:
        given = ServeConfig.load(mesh=self.machine.config.mesh, **SMALL, **settings)
        lent = self.machine.serving(given)
        lent.patience = Patience(patience, 20.0)
        self.engines.append(Engine.on(lent))
        return self.engines[-1]

    def end(self) -> None:
        for executor in self.machine.executors:
            executor.fault = None
        for stuck in HangingDevice.made:
            stuck.free.set()
        for engine in self.engines:
            engine.close()
        for executor in self.machine.executors:
            executor._flying.clear()  # jobs of a loop that died without ending them


class Submitted:
    """One request and the deltas that it receives."""

    def __init__(self, engine: Engine, params: SamplingParams = PARAMS, prompt: Sequence[int] = (5,) * 5) -> None:
        self._news: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.tokens: list[int] = []
        self.id = engine.submit(NewRequest(prompt, params, NO_SLO), self._news.put)

    def whole(self) -> list[int]:
        """Return all tokens of a request that ends without an error."""
        assert self.end(120.0).error is None
        return self.tokens

    def first(self) -> None:
        """Wait for its first token."""
        while not self.tokens:
            self.tokens += self._news.get(timeout=20).tokens

    def end(self, timeout: float = 20.0) -> Delta:
        """Return the finish reason. Fails if there is none in time."""
        while True:
            delta = self._news.get(timeout=timeout)
            self.tokens += delta.tokens
            if delta.finish_reason is not None:
                return delta


class HangingDevice:
    """A device that hangs in its next step until it is released."""

    made: ClassVar[list[HangingDevice]] = []

    def __init__(self, machine: Machine, index: int) -> None:
        self.made.append(self)
        self.free, self.reached = threading.Event(), threading.Event()
        self.executor = machine.executors[index]
        self.executor.fault = self._fault

    def _fault(self, plan: StepPlan) -> None:
        self.executor.fault = None
        self.reached.set()
        assert self.free.wait(60)
