"""Cases of the laws: every policy, admission, router and mesh."""

from __future__ import annotations

import random
from itertools import product
from math import inf
from typing import Any

from hypothesis import strategies as st

from jaxserve.sched import policies
from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import SLO
from tests.support.sched.harness import Job

VARIANTS = [
    "fairbatching:anchor=arrival",
    "fairbatching:budget=fixed",
    "fairbatching:budget=fixed:24",
    "fairbatching:budget=tokens",
    "fairbatching:on_time_set",
    "flowprefill:batch=0",
    "flowprefill:literal",
    "flowprefill:order=edf+no-preempt",
    "kairos:greedy+margin=0.2",
    "kairos:literal",
    "kairos:no-pack+quadratic",
    "kairos:verbatim",
    "prefill=kairos:literal,decode=continuous",
    "prefill=sedf,decode=kairos",
    "sarathi:tokens=8",
    "slos_serve:no-admit",
    "slos_serve:no-dynamic+no-spec",
    "unified:ageing=0.5",
    "unified:no-preempt",
    "vllm:tokens=16",
]
POLICIES = [*policies.names(), *VARIANTS]
P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
MESHES = {"1": (M,), "1P1D": (P, D), "2P2D": (P, P, D, D), "2 mixed": (M, M), "1P2D": (P, D, D)}
ROUTERS = [
    "deflect:dropped",
    "deflect:faster",
    "deflect:slo",
    "fewest_requests",
    "least_work",
    "least_work:write_back",
    "next_replica",
    "prefill_budget",
    "round_robin",
    "unified",
]
ADMISSIONS = ["none", "pab", "pab:refuse", "dp"]
Case = tuple[str, str, str]  # mesh, routing, admission
SLOS = [SLO(ttft, tpot) for ttft, tpot in product((0.004, 0.02, 0.1, 8.0), (0.0015, 0.004, 0.05))] + [SLO(inf, inf)]
JOB = st.builds(
    lambda start, prompt, output, arrival, slo, tier: Job(
        range(start, start + prompt), output, arrival, slo=SLO(inf, inf) if tier == BEST_EFFORT else slo, tier=tier
    ),
    start=st.sampled_from([0, 0, 1000, 2000]),  # equal starts share prefixes
    prompt=st.integers(1, 60),
    output=st.integers(1, 14),
    arrival=st.floats(0, 0.03),
    slo=st.sampled_from(SLOS),
    tier=st.sampled_from([STANDARD, STANDARD, STANDARD, BEST_EFFORT]),
)
JOBS = st.lists(JOB, min_size=2, max_size=10)
FIELDS: dict[str, list[Any]] = {
    "pages": [20, 24, 40, 200],
    "rows": [1, 3, 8],
    "tokens": [4, 16, 48],
    "prompts": [1, 1 << 30],
    "preemptible": [True, False],
    "suspended": [1, 3],
    "lead": [0.0, 0.0, 0.0005],
    "draft": [0, 0, 3],
    "acceptance": [0.6],
    "held": [0.0, 0.0, 0.0015],
    "first_token": ["prefill", "decode"],
    "prefix_caching": [True, False],
}
SHAPE = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FIELDS.items()})


def drawn(seed: object) -> tuple[list[Job], dict[str, Any]]:
    """Draw JOBS and SHAPE by a seed."""
    draw = random.Random(str(seed))
    jobs = []
    for _ in range(draw.randint(4, 14)):
        start, tier = draw.choice([0, 0, 1000, 2000]), draw.choice([STANDARD, STANDARD, STANDARD, BEST_EFFORT])
        slo = SLO(inf, inf) if tier == BEST_EFFORT else draw.choice(SLOS)
        prompt = range(start, start + draw.randint(1, 60))
        jobs.append(Job(prompt, draw.randint(1, 14), draw.uniform(0, 0.03), slo=slo, tier=tier))
    return jobs, {name: draw.choice(values) for name, values in FIELDS.items()}
