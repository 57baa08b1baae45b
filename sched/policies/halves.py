"""A prefill policy and a decode policy, combined according to the role of the instance."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from ..api.perf import Load
from ..api.policy import MIXED_SHARE, Decision, Grant, Policy, Role, View, one_each
from ..feasibility import GRID, decode_load, keeps_objectives, largest_chunk, load_of, mixed_bound, tightest_pace
from . import turns


class Halves:
    """A prefill half and a decode half, combined by role.

    A prefill instance serves prompts first. A mixed instance serves decodes first and cuts prompts to
    what the tightest TPOT or TBT leaves. On a decode instance prompts (deflected, or recomputed after a drop)
    are piggybacked on the decodes, or have the whole step if nothing decodes. If the prefill half
    preempts steps and the instance can, prompts and decodes alternate instead (see `turns`).
    """

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        self._prefill = prefill
        self._decode = decode
        self._stops = bool(getattr(prefill, "stops", False))

    def decide(self, view: View) -> Decision:
        prompts = self._prefill.decide(view) if len(view.prefill) or view.suspended else Decision()
        alternate = self._stops and view.limits.preemptible and view.role is Role.MIXED and len(view.decode) > 0
        if view.running is not None:
            return turns.asked(view, view.running, prompts) if alternate else prompts
        if prompts.resume is not None and not alternate:
            return prompts
        decode = self._decode.decide(view).grants if len(view.decode) else ()
        if view.role is Role.PREFILL:
            return replace(prompts, grants=prompts.grants + decode)
        if not decode or not (prompts.grants or prompts.resume is not None):
            return replace(prompts, grants=decode + prompts.grants)
        if view.role is Role.DECODE:
            load, bound = decode_load(view.decode), view.limits.mixed_share * tightest_pace(view.decode)
            cut, joint = piggyback(view, prompts.grants, load, bound)
            alone = view.perf.step_time(load)
            if alone > bound and not keeps_objectives(view.decode, view.start, view.perf.step_time(joint)):
                cut = prompts.grants
            return replace(prompts, grants=one_each(view.decode) + cut)
        if alternate and not (view.decoded and turns.no_room(view, prompts)):
            return turns.turn(view, prompts, decode)
        return replace(prompts, grants=decode + beside(view, prompts.grants, decode))


def beside(view: View, grants: tuple[Grant, ...], decode: tuple[Grant, ...]) -> tuple[Grant, ...]:
    """Cut prompt chunks to what a step with the chosen decodes leaves of the tightest TPOT and TBT.

    If the decodes leave nothing, the first prompt gets a few tokens so that it makes progress. If the
    step is then too long for every decode, the chunks are not cut at all, since cutting gains nothing.
    """
    chosen = {grant.request for grant in decode}
    context = view.decode.context
    if len(chosen) < len(view.decode):
        context = context[[row.id in chosen for row in view.decode]]
    load, bound = load_of(context), mixed_bound(view, gap=MIXED_SHARE, share=MIXED_SHARE)
    cut, joint = piggyback(view, grants, load, bound)
    if not cut:
        cut, joint = piggyback(
            view, tuple(Grant(grant.request, min(grant.tokens, GRID)) for grant in grants[:1]), load, inf
        )
    if cut == grants or not isfinite(bound):
        return cut
    return cut if keeps_objectives(view.decode, view.start, view.perf.step_time(joint)) else grants


def piggyback(view: View, grants: tuple[Grant, ...], load: Load, bound: float) -> tuple[tuple[Grant, ...], Load]:
    """Cut prompt chunks so that a step of `load` with them takes at most `bound` seconds; return them and the step."""
    cut = []
    requests = {request.id: request for request in view.prefill}
    for grant in grants:
        request = requests[grant.request]
        left = min(grant.tokens, request.remaining)
        tokens = largest_chunk(view.perf.step_time, load, request.context, left, bound)
        if not tokens and request.generated:
            tokens = min(left, GRID)  # a request that was decoding before its KV was dropped must make progress
        if not tokens:
            break
        cut.append(Grant(grant.request, tokens))
        load = load.add_chunk(tokens, request.context)
    return tuple(cut), load
