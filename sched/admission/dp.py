"""Admission by the dynamic program of SLOs-Serve (arXiv 2504.08784, sections 3.1 and 4.2)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ..api.instance_view import InstanceMemo, InstanceView
from ..api.perf import Array
from ..api.policy import Role, View
from ..api.request import Request, tightest
from ..policies.slos_serve.commitments import (
    ROUNDING,
    Commitments,
    Prompts,
    blocks,
    check_block,
    demand,
    idle_of,
    in_time,
    prompts_of,
    quantum,
    standing_of,
    terms_of,
)
from ..policies.slos_serve.dp import admitted
from ..policies.slos_serve.speculation import NEVER, StepCosts


class ByDP:
    """An admission control that admits requests whose SLO fits beside everything already promised.

    Each request is decided on arrival, so requests are not weighed against each other by value.
    `margin`, `block`, `output`: see policies/slos_serve. Writer of its memo per instance.
    """

    def __init__(self, refuse: bool = False, margin: float = 0.05, block: float = 0.0, output: int = 256) -> None:
        self.refuse = refuse
        self._margin = margin
        self._block = check_block(block)
        self._output = output
        self._promised = InstanceMemo(self._standing)

    def admits(self, request: Request, instance: InstanceView, now: float) -> bool:
        view, standing, terms = self._promised.of(instance, now)
        ttft, length = np.array([request.slo.ttft]), np.array([float(request.prompt_length)])
        own = quantum(view.perf, ttft, length, view.limits.tokens)
        terms = replace(terms, idle=min(terms.idle, self._block * request.slo.ttft if self._block else own))
        cached = float(instance.cached_tokens(request))
        tokens, context = np.array([request.known - cached]), np.array([cached])
        ends = view.start + view.perf.prefill_times(tokens, context, view.limits.tokens)
        if ends[0] > request.deadline + ROUNDING:
            return False  # late even if computed at once: no promise bounds the steps before it
        new = self._prompt(request, view, tokens, context)
        alone = partial(in_time, view, new.deadline, tokens, context, length, new.tpot)
        return bool(admitted(standing, new, terms, None, alone)[0])

    def _standing(self, instance: InstanceView, start: float) -> tuple[View, Commitments, StepCosts]:
        view = instance.view(start, start)
        standing = standing_of(view, prompts_of(view, view.prefill.standard, self._output), self._output)
        terms = terms_of(view, idle_of(view, self._block), draft=view.limits.draft, margin=self._margin)
        return view, _with_drafting(standing, instance, view), terms

    def _prompt(self, request: Request, view: View, tokens: Array, context: Array) -> Prompts:
        tpot = NEVER if view.role is Role.PREFILL else tightest(request, request.slo.tpot_of(request.stage))
        return Prompts(
            np.array([request.deadline]),
            demand(view.perf, tokens, context, view.limits.tokens),
            np.array([tpot]),
            blocks(tokens + self._output, view),
        )


def _with_drafting(standing: Commitments, instance: InstanceView, view: View) -> Commitments:
    """Add the decodes with unverified drafts, which are in no queue of the view."""
    drafting = [request for request in instance if (request.drafting or request.held) and request.tier != "best_effort"]
    if not drafting or view.role is Role.PREFILL:
        return standing
    tpot = [tightest(request, request.slo.tpot_of(request.stage)) for request in drafting]
    return replace(
        standing,
        tpot=np.concatenate([standing.tpot, tpot]),
        context=np.concatenate([standing.context, [float(request.computed) for request in drafting]]),
    )
