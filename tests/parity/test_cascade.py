"""Cascade attention changes no token: prefixes shared by the rows of decode, prompt and verify steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.instance import prefix_groups
from jaxserve.settings.speculative import Speculative
from tests.support.parity.asks import ROOMY, setup
from tests.support.parity.law import SPEC, Ask, Setup, compare

SETUPS: list[Any] = [
    ("1x1", {}),
    pytest.param("1x2", {"preempt_boundary": "layer"}, marks=pytest.mark.full),
    pytest.param("1x1", {"speculative": Speculative("ngram", 3)}, marks=pytest.mark.full),
]


def asks() -> tuple[Ask, ...]:
    """Return requests of which most begin with one of two prefixes."""
    draw = random.Random(5)
    heads = [[draw.randrange(8, SPEC.vocab) for _ in range(length)] for length in (96, 64)]
    made = []
    for index in range(10):
        own = [draw.randrange(8, SPEC.vocab) for _ in range(draw.randint(1, 60))]
        params = SamplingParams(max_tokens=draw.randint(16, 30), temperature=(0.0, 0.9)[index % 4 == 3], seed=index)
        made.append(Ask((*heads[index % 7 == 0], *own), params, 0.05 if index < 2 else 0.0))
    return tuple(made)


@pytest.mark.parametrize(("mesh", "options"), SETUPS, ids=str)
def test_a_prefix_that_is_read_once_changes_no_token(
    mesh: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_TOKENS", 32)
    plans: list[StepPlan] = []
    served, _ = Setup(mesh, 64, ROOMY, cascade_attention="on", **options).run(asks(), watch=plans.append)
    assert sum(len(plan.shared) > 0 for plan in plans) > 10
    if not options:
        assert any(0 < group.decodes < len(group.spans) for plan in plans for group in plan.shared), "never mixed"
    assert compare(asks(), served, setup("1x1", 64, ROOMY).each(asks())) <= 1
