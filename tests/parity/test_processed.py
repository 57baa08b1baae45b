"""No schedule changes the tokens of requests with logits processors: drafts are verified against their logits."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from jaxserve.cli.replay import perf_of
from jaxserve.engine.programs.processors import Processor
from jaxserve.engine.startup.processors import load
from jaxserve.sched.api.policy import Policy
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.structured_outputs import StructuredOutputs
from jaxserve.sched.journal import Journal, replay
from jaxserve.settings.speculative import Speculative
from tests.support.parity.asks import ROOMY, TIGHT, asks, begun
from tests.support.parity.law import SPEC, Ask, Setup, assert_allowed, compare
from tests.support.parity.policies import DRAFT, Longest
from tests.support.processors import package

SURE = 0.2
FIELDS = (
    {"logits_processors": [{"name": "turned", "argument": 1.5}]},
    {},
    {"logits_processors": ["top_sigma"]},
    {"logits_processors": ["turned"], "structured_outputs": StructuredOutputs(regex="[a-h]{6,30}")},
    {"logits_processors": [{"name": "top_sigma", "argument": 0.5}]},
    {},
    {"logits_processors": [{"name": "sure", "argument": SURE}]},
)
ENDED = [6, 13]  # the requests that have no token left after a while


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Processor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package(tmp_path_factory.mktemp("package")))
        return load(["turned", "top_sigma", "sure"], SPEC.vocab)


@pytest.fixture(scope="module")
def setup(processors: Mapping[str, Processor]) -> Setup:
    """Two instances that draft; the reference and all schedules use their programs."""
    ngram = Speculative("ngram", DRAFT, prompt_lookup_min=1, prompt_lookup_max=3)
    return Setup("2x1", 64, ROOMY, speculative=ngram, processors=processors)


@pytest.fixture(scope="module")
def alone(setup: Setup) -> Sequence[Request]:
    return setup.narrowed("1x1", 64, ROOMY).each(processed())


@cache
def processed() -> tuple[Ask, ...]:
    """Return requests of all kinds of sampling, most of them with processors."""
    found = []
    for index, ask in enumerate(asks(4, 14)):
        fields = FIELDS[index % len(FIELDS)]
        found.append(replace(ask, params=replace(ask.params, **fields, max_tokens=30)))  # type: ignore[arg-type]
    return tuple(found)


def test_requests_without_a_processor_are_those_of_a_server_without_any(setup: Setup, alone: Sequence[Request]) -> None:
    plain = [replace(ask, params=replace(ask.params, logits_processors=())) for ask in processed()]
    served, _ = setup.run(plain)
    for ask, plainly, mine in zip(processed(), served, alone, strict=True):
        names = [name for name, _ in ask.params.logits_processors]
        if "turned" in names or not names:  # the best token of `top_sigma` is that of the model
            assert (plainly.output != mine.output) is bool(names)


@pytest.mark.parametrize(
    ("mesh", "chunk", "pages", "policy"),
    [("1x1", 64, TIGHT, "unified"), ("2x1", 16, ROOMY, "kairos"), ("1x1", 64, ROOMY, Longest)],
    ids=["preempted", "moved", "drafted"],
)
def test_no_schedule_changes_processed_outputs(
    setup: Setup, processors: Mapping[str, Processor], alone: Sequence[Request],
    mesh: str, chunk: int, pages: int, policy: str | Callable[[], Policy],
) -> None:  # fmt: skip
    served, cluster = setup.narrowed(mesh, chunk, pages).run(processed(), policy)
    drafted = sum(core.scheduler.counters.drafted for core in cluster.cores)
    assert (drafted > 0) is (policy is Longest)
    assert [at for at, request in enumerate(served) if request.finish_reason == "rejected"] == ENDED
    assert all(request.error is None or at in ENDED for at, request in enumerate(served))
    assert compare(processed(), served, alone, processors=processors) <= 1
    for ask, request in zip(processed(), served, strict=True):
        if ask.params.constrained:
            assert request.output
            assert_allowed(ask, request.output)


def test_a_request_continues_elsewhere_with_its_processors(
    setup: Setup, processors: Mapping[str, Processor], alone: Sequence[Request]
) -> None:
    served, _ = setup.run(begun(processed(), alone), "distserve")
    assert compare(processed(), served, alone, processors=processors) <= 1


def test_the_journal_replays_to_the_same_plans(setup: Setup) -> None:
    file = io.StringIO()
    served, _ = setup.narrowed("1x1", 64, TIGHT).run(processed(), "kairos", journal=Journal(file))
    outcome = replay(file.getvalue().splitlines(), perf_of)
    assert outcome.differences == [] and outcome.plans > 20
    assert [outcome.requests[one.id].params for one in served] == [ask.params for ask in processed()]
