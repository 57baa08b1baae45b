"""The load of a step, and the interfaces of step-time models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from .plan import SharedPrefix

Array = np.ndarray[Any, np.dtype[np.float64]]
Number = float | Array


class Load(NamedTuple):
    """The inputs of a step-time model for one step, in tokens unless a comment says otherwise."""

    prefill: int = 0  # new prompt tokens
    decode: int = 0  # tokens of running decodes: one each, plus their drafted tokens
    quadratic: float = 0.0  # sum over chunks of k*c + k*k/2, with k new tokens after c computed ones
    longest: int = 0  # longest decode context
    context: int = 0  # sum of decode contexts, of which a prefix that is read together counts once
    prefix: int = 0  # sum over chunks of c, the context before the chunk, likewise
    drafts: int = 0  # steps of the draft model: the longest draft in the batch

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode

    def add_chunk(self, k: int, c: int) -> Load:
        """Return this load with a chunk of k new prompt tokens after c computed ones."""
        prefill, decode, quadratic, longest, context, prefix, drafts = self  # _replace is three times slower
        quadratic = quadratic + k * c + k * k / 2
        return tuple.__new__(Load, (prefill + k, decode, quadratic, longest, context, prefix + c, drafts))

    def add_decode(self, context: int) -> Load:
        """Return this load with one more running decode of this context."""
        return self.add_rows(1, context, context)

    def add_rows(self, tokens: int, longest: int, context: int) -> Load:
        """Return this load with more running decodes.

        `tokens` is their total, `longest` their longest context and `context` the sum of their
        contexts.
        """
        prefill, decode, quadratic, before, others, prefix, drafts = self
        longest = longest if longest > before else before
        return tuple.__new__(Load, (prefill, decode + tokens, quadratic, longest, others + context, prefix, drafts))

    def share(self, groups: Iterable[SharedPrefix], page_size: int) -> Load:
        """Return this load if each group reads its prefix once.

        One reading stays, in `context` if the group has a decode, so that `context` is never below
        `longest`. The attention scores, `quadratic`, are computed for each span as before.
        """
        context, prefix = self.context, self.prefix
        for spans, pages, decodes in groups:
            chunks = len(spans) - decodes
            context -= pages * page_size * max(decodes - 1, 0)
            prefix -= pages * page_size * (chunks if decodes else chunks - 1)
        return self._replace(context=context, prefix=prefix)


class Form(Protocol):
    """A step-time model, by formula or table. Times are in seconds."""

    def step_time(self, load: Load) -> float:
        """Predict the seconds of a step. Elementwise if `quadratic` and `prefix` of the load are arrays."""

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        """Predict the seconds of decode-only steps, elementwise, from rows, longest context and total context."""

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        """Predict the seconds to prefill `tokens` more prompt tokens after `context` computed ones.

        The prompt runs alone, in chunks of `chunk` tokens, of which the last may be shorter.
        Elementwise, 0 for no tokens. Equals the sum of `step_time` over these steps.
        """


class PerfModel(Form, Protocol):
    """A step-time model that learns online. Writer of its state: the Scheduler that settles steps."""

    @property
    def version(self) -> int:
        """A number that changes whenever predictions change."""

    @property
    def prefill_rate(self) -> float:
        """Recently observed prompt tokens per second (mu in Kairos)."""

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a measured step."""
