"""Step times of an engine that has few programs at first: what was measured holds for the programs that it has."""

from __future__ import annotations

import io
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.journal import Journal, replay
from jaxserve.sched.perf.buckets import Buckets, Padded
from jaxserve.sched.perf.model import Coefficients
from jaxserve.sched.perf.profile import priced, probes
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.policies import make
from tests.support.examples import examples
from tests.support.sched.views import prompt

WHOLE = Buckets((1, 4, 8, 16), (64, 96, 128, 256))
TRUTH = Coefficients(fixed=2e-3, prefill=2e-5, decode=1e-4, quadratic=1e-9, longest=1e-8, context=1e-8)
LIMITS = Limits(256, 16, 500, 16)


def recipe(buckets: Buckets) -> Recipe:
    """Return the recipe of an engine with these programs, measured without noise."""
    loads = (probe.load for probe in probes(LIMITS, 2000, buckets))
    return Recipe(points=tuple(priced(loads, Padded(TRUTH, buckets).step_time)), buckets=buckets)


def some(sizes: tuple[int, ...], *always: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw some of the sizes, with those that an engine has from the beginning."""
    return st.sets(st.sampled_from(sizes)).map(lambda found: tuple(sorted({*found, *always})))


@settings(max_examples=examples(60))
@given(st.builds(Buckets, some(WHOLE.decode, 1, 16), some(WHOLE.mixed, 256)), st.integers(1, 16), st.integers(0, 250))
def test_predictions_are_right_for_the_programs_that_there_are(ready: Buckets, rows: int, prompt: int) -> None:
    """Whether the profile is of fewer programs, as at a first start, or of all, as at a later one."""
    load = Load().add_rows(rows, 64 * rows, 64)
    load = load.add_chunk(prompt, 0) if prompt else load
    expected = Padded(TRUTH, ready).step_time(load)
    for measured in (recipe(Buckets((1, 16), (256,))), recipe(WHOLE)):
        model = measured.padded(ready).make()
        assert abs(model.step_time(load) / expected - 1) < 0.05


def test_a_recipe_without_a_fitting_point_keeps_all() -> None:
    one = replace(recipe(WHOLE), points=((Load().add_rows(4, 400, 100), 3e-3),))
    assert one.padded(Buckets((1, 16), (64, 256))).points == one.points


def test_a_scheduler_plans_with_what_it_adopted_and_its_journal_knows() -> None:
    """A chunk is fitted to the sizes that there are; a replay makes the same plans."""
    file = io.StringIO()
    few, all_of_them = recipe(Buckets((1, 16), (64, 256))), recipe(WHOLE)
    journal, made = Journal(file), replace(LIMITS, stairs=few.buckets.mixed)
    log = journal.instance(
        "0", policy="sarathi", limits=made, role=Role.MIXED, prefix_caching=True,
        perf=few.record(),
    )  # fmt: skip
    scheduler = Scheduler(make("sarathi"), few.make(), made, log=log)
    before = scheduler.version
    scheduler.add(prompt(1, 90))
    assert scheduler.view(0.0, 0.0).perf.step_time(Load().add_chunk(90, 0)) > 7e-3, "in the program for 256 tokens"
    scheduler.adopt(all_of_them.make(), all_of_them.buckets.mixed, all_of_them.record())
    assert scheduler.version != before and scheduler.limits.stairs == WHOLE.mixed
    assert scheduler.view(0.0, 0.0).perf.step_time(Load().add_chunk(90, 0)) < 4.5e-3, "in the program for 96 tokens"
    plan = scheduler.plan(0.0, 0.0)
    assert plan is not None and plan.spans[0].length == 90
    replayed = replay(io.StringIO(file.getvalue()), lambda record: Recipe.of(record).make())
    assert replayed.plans == 1 and not replayed.differences
    assert replayed.instances["0"]["perf"]["buckets"]["mixed"] == list(WHOLE.mixed)
