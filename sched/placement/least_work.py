"""Where the least work is left, after each instance's own prefix-cache hit."""

from __future__ import annotations

from ..request import Request
from ..scheduler import Scheduler


class LeastWork:
    def prefill(self, request: Request, instances: list[Scheduler]) -> list[int]:
        def work(index: int) -> tuple[int, int, int]:
            one = instances[index]
            new = request.prompt_length - one.cached_tokens(request)
            return (one.prefill_backlog + new, one.decode_context, index)

        return sorted(range(len(instances)), key=work)

    def decode(self, request: Request, instances: list[Scheduler]) -> list[int]:
        return sorted(range(len(instances)), key=lambda index: (instances[index].decode_context, index))
