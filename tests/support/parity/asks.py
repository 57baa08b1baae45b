"""Setups and requests of the parity tests."""

from __future__ import annotations

import random
from functools import cache

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import Request
from tests.support.parity.law import LENGTH, PAGE, SPEC, Ask, Setup

ROOMY, TIGHT = 200, LENGTH // PAGE + 2  # pages: for all requests, and for little more than the longest one
STYLES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 6, "logit_bias": ((11, 2.0),)},
)


def asks(seed: int, count: int = 12, *, cancel: bool = False) -> list[Ask]:
    """Return requests of all kinds: every third shares a long prefix, and lengths are around page borders."""
    draw = random.Random(seed)
    shared = [draw.randrange(8, SPEC.vocab) for _ in range(96)]
    made = []
    for index in range(count):
        length = draw.choice([1, PAGE - 1, PAGE, PAGE + 1, draw.randint(2, 140), draw.randint(100, 180)])
        own = [draw.randrange(8, SPEC.vocab) for _ in range(length)]
        prompt = (*shared[: draw.choice([48, 96])], *own[:40]) if index % 3 == 0 else tuple(own)
        params = SamplingParams(
            max_tokens=draw.randint(6 if index % len(STYLES) == 5 else 1, 40),
            seed=draw.randrange(2**40),
            **STYLES[index % len(STYLES)],  # type: ignore[arg-type]
        )
        made.append(Ask(tuple(prompt), params, draw.choice([0.0, 0.0, 0.003, 0.01]), cancel and index % 4 == 1))
    return made


@cache
def setup(mesh: str, tokens: int, pages: int, mode: str = "auto") -> Setup:
    return Setup(mesh, tokens, pages, mode)


@cache
def alone(seed: int) -> tuple[Request, ...]:
    """Return the reference: each request alone on 1x1."""
    reference = setup("1x1", 64, ROOMY)
    return tuple(reference.run([ask])[0][0] for ask in asks(seed))


class Faults:
    """Make every n-th step raise, unless it has a request that failed before and would then fail for good."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0
        self._failed: set[int] = set()

    def __call__(self, plan: StepPlan) -> None:
        self._count += 1
        requests = {span.request for span in plan.spans}
        if self._count % self._every == self._every // 2 and self._failed.isdisjoint(requests):
            self._failed |= requests
            raise RuntimeError("injected: the device ran out of memory")
