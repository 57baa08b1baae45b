"""One policy for prompts and one for decoding, put together by the role of the instance."""

from __future__ import annotations

from dataclasses import replace

from ..feasibility import GRID, decode_load, largest_chunk, tightest_tpot
from ..policy import Decision, Grant, Policy, Role, View, one_each

SHARE = 0.75  # of the tightest tpot: a request that joins waits for the running mixed step


class Halves:
    """Prompts first on a prefill instance; on a mixed one decoding first and prompts in what the budget leaves.

    On a decode instance prompts are guests (deflected, or computed again): they take what a step of `SHARE` of the
    tightest tpot leaves beside all who decode, or the whole step where nobody does.
    """

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        self._prefill = prefill
        self._decode = decode

    def decide(self, view: View) -> Decision:
        prompts = self._prefill.decide(view) if len(view.prefill) or view.suspended else Decision()
        if view.running is not None or prompts.resume is not None:
            return prompts
        decode = self._decode.decide(view).grants if len(view.decode) else ()
        if view.role is Role.PREFILL:
            return replace(prompts, grants=prompts.grants + decode)
        if view.role is Role.DECODE and decode and prompts.grants:
            decode = one_each(view.decode)
            return replace(prompts, grants=decode + guests(view, prompts.grants))
        return replace(prompts, grants=decode + prompts.grants)


def guests(view: View, grants: tuple[Grant, ...], share: float = SHARE) -> tuple[Grant, ...]:
    """Prompt chunks cut to what a step with every decoding row leaves of `share` of the tightest tpot."""
    load, bound, cut = decode_load(view.decode), share * tightest_tpot(view.decode), []
    requests = {request.id: request for request in view.prefill}
    for grant in grants:
        request = requests[grant.request]
        left = min(grant.tokens, request.remaining)
        tokens = largest_chunk(view.perf.step_time, load, request.context, left, bound)
        if not tokens and request.generated:
            tokens = min(left, GRID)  # it was a resident before its KV was dropped: it comes back, if slowly
        if not tokens:
            break
        cut.append(Grant(grant.request, tokens))
        load = load.add_chunk(tokens, request.context)
    return tuple(cut)
