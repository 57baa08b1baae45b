"""Where the least work is left, after each instance's own prefix-cache hit."""

from __future__ import annotations

from ..api.request import Request
from .base import Fleet, Router


class LeastWork(Router):
    """write_back: the KV of a finished request's answer is copied to the instance that computed its prompt, for the
    next round of the conversation (see kv_transfer.py)."""

    def __init__(self, write_back: bool = False) -> None:
        self.writes_back = write_back

    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        def work(index: int) -> tuple[int, int, int]:
            one = fleet.instances[index]
            new = request.prompt_length - one.cached_tokens(request)
            return (one.prefill_backlog + new, one.decode_context, index)

        return sorted(fleet.entries, key=work)
