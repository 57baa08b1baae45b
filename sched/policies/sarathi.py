"""Sarathi-Serve's stall-free batching: everything that decodes, and prompts in what a token budget leaves."""

from __future__ import annotations

import numpy as np

from ..api.errors import InvalidValue
from ..api.perf import Load
from ..api.policy import Decision, Role, View
from ..feasibility import hopeful
from .batch import Batch, admissible, first_come, stall_free_tokens


class Sarathi:
    """Decode-prioritised (FairBatching, arXiv 2510.14392, section 2.3): every row decodes in every step, and prompts,
    first come first served, get chunks of what is left of `tokens`.

    Where the step of such a budget is too long for every row that decodes, it is that of the limits instead.

    tokens: budget of a step; 0, the default, is what a profile of the model would set: the most prompt tokens whose
    step alone takes `share` of the tightest tpot; the rest is for the contexts of those who decode, which a budget in
    tokens does not see. A large one (8192) is how vLLM's present engine batches by default. On a prefill instance,
    where nobody decodes, it is the limit of the step.
    """

    def __init__(self, tokens: int = 0, share: float = 0.9) -> None:
        if tokens < 0:
            raise InvalidValue(
                f"sarathi {tokens=} must be at least 1, or 0 for what the step-time model says", "tokens"
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
            batch = self._batch(view, view.limits.tokens)  # too long for every row in any case
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
