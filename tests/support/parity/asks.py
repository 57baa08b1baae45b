"""Setups and requests of the parity tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from jaxserve.sched.api.new_request import Progress
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.settings.speculative import Speculative
from tests.support.examples import whole
from tests.support.parity.law import LENGTH, PAGE, SPEC, Ask, Setup
from tests.support.parity.policies import DRAFT

ROOMY, TIGHT = 200, LENGTH // PAGE + 2  # pages: for all requests, and for little more than the longest one
NGRAM = Speculative("ngram", DRAFT, prompt_lookup_min=1, prompt_lookup_max=3)
STYLES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 6, "logit_bias": ((11, 2.0),)},
)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["left", "right"]}, "c": {"type": "boolean"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
KINDS = (
    StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True),
    None,
    StructuredOutputs(regex=r"[a-f]{3,9}(-[0-9]{2})+!"),
    StructuredOutputs(choice=("yes, gladly", "yes, but", "no")),
    StructuredOutputs(grammar='start: "<" /[^<>]{4,12}/ ">" end\nend: "." | ";"'),
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
def constrained(seed: int) -> tuple[Ask, ...]:
    """Return requests of all kinds of sampling, four of five with a constraint."""
    made = []
    for index, ask in enumerate(asks(seed)):
        params = replace(ask.params, structured_outputs=KINDS[index % len(KINDS)], min_tokens=ask.params.min_tokens)
        made.append(replace(ask, params=replace(params, max_tokens=max(40, ask.params.max_tokens or 0))))
    return tuple(made)


WIDER = {"1x1": "2x1", "2x2": "4x2"}  # meshes whose first instances bare runs share
WIDEST = 256  # tokens of a step of the executors that a bare run shares
OWN = (("1x1", 16),)  # bare runs build these sizes too, whose steps have a program smaller than any shared one


@cache
def setup(mesh: str, tokens: int, pages: int) -> Setup:
    """Return executors of this size; in a bare run shared ones of the mesh, whose schedulers see this size.

    Every size compiles programs of its own, which takes most of the time of a parity test.
    """
    if whole() or (mesh, tokens) in OWN:
        return Setup(mesh, tokens, pages)
    return _widest(WIDER.get(mesh, mesh)).narrowed(mesh, tokens, pages)


@cache
def _widest(mesh: str) -> Setup:
    return Setup(mesh, WIDEST, ROOMY)


@cache
def guessing() -> Setup:
    """Return an executor whose rows draft from their own tokens."""
    return Setup("1x1", 64, ROOMY, speculative=NGRAM)


@cache
def alone(seed: int) -> tuple[Request, ...]:
    """Return the reference: each request alone on 1x1."""
    return setup("1x1", 64, ROOMY).each(asks(seed))


def begun(requests: Sequence[Ask], served: Sequence[Request]) -> list[Ask]:
    """Return requests that another engine has served up to any place."""
    draw = random.Random(5)
    outputs = [tuple(one.output[: draw.randrange(len(one.output) or 1)]) for one in served]
    return [replace(ask, progress=Progress(out, 0.2, 0.1)) for ask, out in zip(requests, outputs, strict=True)]


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
