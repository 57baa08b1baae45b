"""Instances in random states, for laws of snapshots and routers."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.instance.scheduler import Scheduler
from tests.support.sched.fleet import decodes, instance, request

WAITING = st.tuples(st.integers(1, 600), st.sampled_from([0.05, 0.4, 8.0]), st.sampled_from(["standard", BEST_EFFORT]))


@st.composite
def instances(draw: Any, role: st.SearchStrategy[Role]) -> Scheduler:
    """Draw an instance with running decodes and waiting prompts."""
    one, first = instance(draw(role)), draw(st.integers(0, 1000)) * 100
    if one.role is not Role.PREFILL:
        for at, (context, tpot) in enumerate(
            draw(st.lists(st.tuples(st.integers(2, 300), st.sampled_from([0.02, 0.05])), max_size=3))
        ):
            decodes(one, first + at, context, tpot)
    for at, (tokens, ttft, tier) in enumerate(draw(st.lists(WAITING, max_size=4))):
        one.add(request(first + 50 + at, tokens, ttft, tier))
    one.set_ends(draw(st.sampled_from([0.0, 0.03, 0.2])))
    return one
