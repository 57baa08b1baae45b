"""Stall-free batching of Sarathi-Serve: all decodes, and prompts in the rest of a token budget."""

from __future__ import annotations

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Load
from ..api.policy import Decision, Role, View
from ..feasibility import hopeful
from .batch import Batch, admissible, first_come, stall_free_tokens


class Sarathi:
    """Decode-prioritized batching (FairBatching, arXiv 2510.14392, section 2.3).

    All rows decode in every step. Prompts get chunks of the rest of `tokens`, first come first served. If
    the step of the default budget is too long for every decode, the budget is `limits.tokens` instead. On
    a prefill instance it always is.

    tokens: budget of a step. 0, the default, computes it from the step-time model: the most prompt tokens
        that take, alone, `share` of the tightest TPOT. A large one (8192) is how vLLM batches today.
    share: leaves time for the contexts of the decodes, which a budget in tokens does not see.
    """

    def __init__(self, tokens: int = 0, share: float = 0.9) -> None:
        if tokens < 0:
            raise InvalidValue(
                f"sarathi {tokens=} must be at least 1, or 0 to compute it from the step-time model", "tokens"
            )
        if not 0 < share <= 1:
            raise InvalidValue(f"sarathi {share=} must be more than 0 and at most 1", "share")
        self._tokens = tokens
        self._share = share

    def decide(self, view: View) -> Decision:
        if view.running is not None:
            return Decision()
        budget = self._budget(view)
        batch = self._batch(view, budget)
        if budget < view.limits.tokens and not self._tokens and not hopeful(view, view.perf.step_time(batch.load)):
            batch = self._batch(view, view.limits.tokens)  # no decode can meet its objectives in any case
        return batch.decision(np.arange(len(view.decode)))

    def _batch(self, view: View, budget: int) -> Batch:
        batch = Batch(view, _tokens, budget)
        decode, prompts = view.decode, view.prefill
        best = decode.best_effort > 0
        batch.decode(np.flatnonzero(~best), always=True)
        ready, later = admissible(view, first_come(view))
        last = prompts.best_effort[ready] > 0
        batch.prompts(ready[~last])
        batch.decode(np.flatnonzero(best), always=True)
        batch.prompts(ready[last])
        batch.prompts(later)
        return batch

    def _budget(self, view: View) -> int:
        if view.role is Role.PREFILL:
            return view.limits.tokens
        return self._tokens or stall_free_tokens(view, self._share)


def _tokens(load: Load) -> float:
    return load.tokens
