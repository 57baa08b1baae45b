"""What a step's time depends on, and the protocol of step-time models."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Number = float | Array


class Load(NamedTuple):
    """What a step's time depends on. Tokens unless said otherwise."""

    prefill: int = 0  # new prompt tokens
    decode: int = 0  # tokens of decoding rows: one each, and what they drafted
    quadratic: float = 0.0  # sum over chunks of k*c + k*k/2: k new tokens after c
    longest: int = 0  # longest decode context
    context: int = 0  # sum of decode contexts
    prefix: int = 0  # sum over chunks of c, the context a chunk attends to before itself
    drafts: int = 0  # steps of the draft model: the longest draft of any row

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode

    def add_chunk(self, k: int, c: int) -> Load:
        """With a chunk of k new prompt tokens after c computed ones."""
        prefill, decode, quadratic, longest, context, prefix, drafts = self  # _replace takes three times as long
        quadratic = quadratic + k * c + k * k / 2
        return tuple.__new__(Load, (prefill + k, decode, quadratic, longest, context, prefix + c, drafts))

    def add_decode(self, context: int) -> Load:
        """With one more decoding row of that context."""
        return self.add_rows(1, context, context)

    def add_rows(self, tokens: int, longest: int, context: int) -> Load:
        """With more decoding rows, of so many tokens, the longest context among them, and the sum of their contexts."""
        prefill, decode, quadratic, before, others, prefix, drafts = self
        longest = longest if longest > before else before
        return tuple.__new__(Load, (prefill, decode + tokens, quadratic, longest, others + context, prefix, drafts))


class Form(Protocol):
    """Step times in seconds, by formula or table."""

    def step_time(self, load: Load) -> float:
        """Predicted seconds of a step. Elementwise where `quadratic` and `prefix` of the load are arrays."""

    def decode_times(self, rows: Array, longest: Array, context: Array) -> Array:
        """Predicted seconds of pure decode steps, elementwise: rows, longest context, sum of contexts."""

    def prefill_times(self, tokens: Array, context: Array, chunk: int) -> Array:
        """Predicted seconds to compute `tokens` more prompt tokens after `context` computed ones, alone, in steps of
        `chunk` tokens of which the last may be shorter; elementwise, 0 for no tokens. Equal to the sum of step_time
        over these steps."""


class PerfModel(Form, Protocol):
    """A form that learns. Writer of its state: the Scheduler that settles steps."""

    @property
    def version(self) -> int:
        """What it predicts is what it was as long as this is."""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, as observed lately (Kairos's mu)."""

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a measured step."""
