"""Speculation changes no greedy and no sampled token, with any drafter and any draft length."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.models.spec import ModelSpec
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Decision, Grant, View
from jaxserve.sched.api.request import Request
from jaxserve.sched.journal import Journal, replay
from jaxserve.settings.speculative import Speculative
from tests.support.examples import cases
from tests.support.parity.asks import NGRAM, ROOMY, STYLES, TIGHT, guessing
from tests.support.parity.asks import setup as targets
from tests.support.parity.law import PAGE, SPEC, Ask, Setup, compare, weights
from tests.support.parity.policies import DRAFT

FEW = 2  # most drafted tokens of a row; for the draft model, which has programs for every length, in a bare run
MODEL = Speculative("draft_model", DRAFT, model="given")


class Uneven:
    """First come, first served, with a different draft length for every row and step."""

    def __init__(self, most: int) -> None:
        self._draw, self._most = random.Random(5), most

    def decide(self, view: View) -> Decision:
        rows = tuple(Grant(one.id, 1, self._draw.randint(0, self._most)) for one in view.decode)
        return Decision((*rows, *(Grant(one.id, one.remaining) for one in view.prefill)))


def close(spec: ModelSpec, dtype: Any, meshes: Sequence[Any]) -> list[Any]:
    """Return a draft model that is usually right: the perturbed target."""

    def shaken(leaf: Any) -> Any:
        noise = np.random.default_rng(leaf.size).normal(0.0, 0.1, leaf.shape).astype(leaf.dtype)
        return jax.device_put(np.asarray(leaf) * (1 + noise), leaf.sharding)

    return [jax.tree.map(shaken, tree) for tree in weights(spec, dtype, meshes)]


OTHER = replace(SPEC, layers=1, heads=4, kv_heads=2, head_dim=8, dim=32, ff_dim=48)
DRAFTERS: dict[str, dict[str, Any]] = {
    "": {},
    "ngram": {"speculative": NGRAM},
    "close": {"speculative": MODEL, "draft": SPEC, "load_draft": close},
    "other": {"speculative": MODEL, "draft": OTHER, "load_draft": weights},
}


# The executors of the other parity tests.
SHARED: dict[str, Callable[[], Setup]] = {"": lambda: targets("1x1", 64, ROOMY), "ngram": guessing}


@cache
def setup(mesh: str, tokens: int, pages: int, drafter: str = "", most: int = DRAFT) -> Setup:
    if (mesh, tokens, pages, most) == ("1x1", 64, ROOMY, DRAFT) and drafter in SHARED:
        return SHARED[drafter]()
    options = dict(DRAFTERS[drafter])
    if drafter:
        options["speculative"] = replace(options["speculative"], num_speculative_tokens=most)
    return Setup(mesh, tokens, pages, **options)


def asks(seed: int, count: int = 8) -> list[Ask]:
    """Return repetitive prompts, so that some drafts are right, with all ways to sample."""
    draw = random.Random(seed)
    shared = [draw.randrange(8, SPEC.vocab) for _ in range(40)]
    made = []
    for index in range(count):
        phrase = [draw.randrange(8, SPEC.vocab) for _ in range(draw.randint(1, 9))]
        own = (phrase * 12)[: draw.choice([1, PAGE, PAGE + 1, draw.randint(2, 100)])]
        prompt = (*shared, *own) if index % 3 == 0 else tuple(own)
        params = SamplingParams(
            max_tokens=draw.randint(6, 40),
            seed=draw.randrange(2**40),
            **STYLES[index % len(STYLES)],  # type: ignore[arg-type]
        )
        made.append(Ask(tuple(prompt), params, draw.choice([0.0, 0.0, 0.003, 0.01])))
    return made


@cache
def alone(seed: int) -> tuple[Request, ...]:
    return setup("1x1", 64, ROOMY).each(asks(seed))


CASES = [
    (mesh, tokens, pages, drafter, DRAFT)
    for mesh, tokens, pages in (("1x1", 64, ROOMY), ("1x2", 16, TIGHT), ("2x1", 64, TIGHT))
    for drafter in ("ngram", "close", "other")
]
SAMPLE = [("1x1", 64, ROOMY, "ngram", DRAFT), ("2x1", 64, TIGHT, "close", FEW)]


@pytest.mark.parametrize("case", cases(SAMPLE, CASES), ids=str)
def test_drafts_do_not_change_the_tokens(case: tuple[str, int, int, str, int]) -> None:
    requests, (mesh, *_, drafter, most) = asks(1), case
    served, cluster = setup(*case).run(requests, partial(Uneven, most))
    assert compare(requests, served, alone(1)) <= 1
    assert all(request.finish_reason in ("stop", "length") for request in served)
    drafted = sum(core.scheduler.counters.drafted for core in cluster.cores)
    right = sum(core.scheduler.counters.accepted for core in cluster.cores)
    assert drafted > right
    assert right > 0 or drafter == "other"
    if mesh == "2x1":
        assert cluster.kv_transfers.transfers > 0, "no KV was transferred"
    if drafter == "close":
        assert right > 0.3 * drafted, "KV of the draft model is missing or wrong"


def test_a_journal_of_drafts_replays_to_the_same_plans() -> None:
    """Acceptance and step times are inputs of the plans and follow from the results."""
    file = io.StringIO()
    requests = asks(1)
    served, cluster = setup("1x1", 64, ROOMY, "ngram").run(requests, "distserve/draft", journal=Journal(file))
    assert compare(requests, served, alone(1)) <= 1
    assert cluster.cores[0].scheduler.counters.drafted > 0
    outcome = replay(file.getvalue().splitlines(), perf_of)
    assert outcome.differences == [] and outcome.plans > 20
