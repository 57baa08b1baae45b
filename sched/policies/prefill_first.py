"""Prompts first: the batching of vLLM's V0 engine before chunked prefill, the baseline `vllm` of the papers."""

from __future__ import annotations

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Load
from ..api.policy import Decision, Role, View
from .batch import Batch, admissible, first_come


class PrefillFirst:
    """Prefill-prioritized batching (FairBatching, arXiv 2510.14392, section 2.3).

    While a prompt waits that there is room for, a step holds whole prompts only, first come first served,
    and no decodes. Otherwise all rows decode.

    tokens: limit of a step of prompts. A longer prompt takes one or more steps of its own.
    """

    def __init__(self, tokens: int = 8192) -> None:
        if tokens < 1:
            raise InvalidValue(f"vllm {tokens=} must be at least 1", "tokens")
        self._tokens = tokens

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        ready, later = admissible(view, first_come(view))
        batch = Batch(view, lambda load: load.prefill, self._tokens)
        last = view.prefill.best_effort[ready] > 0
        all_rows = np.arange(len(view.decode))
        batch.prompts(ready[~last], whole=True)
        if not len(batch):
            batch = Batch(view, _nothing, 0.0)
            batch.decode(all_rows, always=True)
            batch.prompts(ready[last], whole=True)
            batch.prompts(later, whole=True)
        return batch.decision(all_rows if _unsure(view) else all_rows[:0])


def _unsure(view: View) -> bool:
    """Return whether room may be overestimated: reserved for KV transfers, or held by best effort."""
    return view.role is Role.DECODE or bool(view.prefill.best_effort.any() or view.decode.best_effort.any())


def _nothing(load: Load) -> float:
    return 0.0
