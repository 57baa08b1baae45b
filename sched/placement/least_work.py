"""Where the least work is left, after each instance's own prefix-cache hit."""

from __future__ import annotations

from ..request import Request
from . import Fleet, Placement


class LeastWork(Placement):
    def prefill(self, request: Request, fleet: Fleet) -> list[int]:
        def work(index: int) -> tuple[int, int, int]:
            one = fleet.instances[index]
            new = request.prompt_length - one.cached_tokens(request)
            return (one.prefill_backlog + new, one.decode_context, index)

        return sorted(fleet.entries, key=work)
