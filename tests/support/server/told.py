"""A receiver of the deltas of one request, for tests on an event loop."""

from __future__ import annotations

import asyncio

from jaxserve.sched.api.plan import Delta


class Told:
    """The deltas of one request."""

    def __init__(self) -> None:
        self.deltas = list[Delta]()
        self.ended, self.begun = asyncio.Event(), asyncio.Event()

    def __call__(self, delta: Delta) -> None:
        assert not self.ended.is_set(), "a delta after the end"
        self.deltas.append(delta)
        if len(self.tokens) >= 3:
            self.begun.set()
        if delta.finish_reason is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def scores(self) -> tuple[int, int]:
        """The number of log-probabilities of the output and of the prompt."""
        return sum(len(one.logprobs) for one in self.deltas), sum(len(one.prompt_logprobs) for one in self.deltas)
