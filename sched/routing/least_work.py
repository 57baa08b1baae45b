"""Least prefill work first, after the prefix-cache hit on each instance."""

from __future__ import annotations

from ..api.perf import Array
from ..api.request import Request
from .base import Fleet, Router, Scalars


class LeastWork(Router):
    """A router that minimizes the prompt tokens to compute before the first token.

    `write_back`: copy the KV of a finished answer to the instance that computed the prompt, for the
    next round of the conversation (see cluster/kv_transfer.py).
    """

    def __init__(self, write_back: bool = False) -> None:
        self.writes_back = write_back

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        def work(index: int) -> tuple[int, int, int]:
            instance = fleet.instances[index]
            new = request.prompt_length - instance.cached_tokens(request)
            return (instance.prefill_backlog + new, instance.decode_context, index)

        return sorted(fleet.entries, key=work)

    def estimate(self, request: Request, scalars: Scalars) -> Array:
        tokens: Array = scalars.backlog - scalars.hits
        return tokens + scalars.context / (1.0 + scalars.context)  # less than a token: decides among equals
