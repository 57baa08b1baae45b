"""A replayed journal reproduces its plans, whatever happened, and a changed plan shows as a difference."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.new_request import NewRequest, Progress
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.policy import Limits, Role
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import SLO, THINKING
from jaxserve.sched.journal import Journal, replay
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES
from tests.support.sched.harness import Job
from tests.support.sched.recorded import check_replay, perf, recorded
from tests.support.sched.roles import ROLE_CHANGES
from tests.support.sched.sources import BEHAVIORS, Source
from tests.support.sched.tiers import TIERS

LIMITS = Limits(4, 64, 32, 4)
FEATURES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "steps fail": st.fixed_dictionaries({"fail": st.sampled_from([4, 7])}),
    "role changes": st.fixed_dictionaries(
        {
            "role_changes": ROLE_CHANGES,
            "first_token": st.sampled_from(["prefill", "decode"]),
            "lead": st.sampled_from([0.0, 0.0005]),
            "roles": st.sampled_from(["2x1", "4x1"]),
        }
    ),
    "KV write-back": st.fixed_dictionaries({"routing": st.just("least_work:write_back"), "roles": st.just("4x1")}),
    "KV tiers": st.fixed_dictionaries({"tiers": TIERS}),
    "KV sources": st.lists(st.sampled_from(BEHAVIORS), min_size=1).map(lambda does: {"sources": [Source(does)]}),
    "held requests": st.fixed_dictionaries({"held": st.sampled_from([0.0005, 0.01])}),
    "preemption": st.fixed_dictionaries(
        {
            "policy": st.just("flowprefill"),
            "preemptible": st.just(True),
            "suspended": st.just(3),
            "fail": st.sampled_from([4, 10_000]),
        }
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    roles=st.sampled_from(list(ROLES)),
    policy=st.sampled_from(["distserve", "kairos", "slos_serve", "unified"]),
    draft=st.sampled_from([0, 3]),
    data=st.data(),
)
@settings(max_examples=examples(60))
def test_replay_reproduces_every_plan(
    feature: str, jobs: list[Job], roles: str, policy: str, draft: int, data: st.DataObject
) -> None:
    """And equal runs have equal journals."""
    shape = {"roles": roles, "policy": policy, "draft": draft, "acceptance": 0.6, **data.draw(FEATURES[feature])}
    first, second = (recorded(jobs, **deepcopy(shape)) for _ in range(2))
    assert first == second
    check_replay(first)


@pytest.mark.parametrize("hangs", ["prefill0", "prefill1", "decode2", "decode3"])
def test_replay_reproduces_the_plans_around_a_hung_step(hangs: str) -> None:
    jobs, seen = [Job(range(50 * at, 50 * at + 4 + at % 9), 3 + at % 7, 0.3 * at) for at in range(24)], [0]

    def late(name: str, plan: StepPlan) -> float:
        seen[0] += name == hangs
        return 300.0 if name == hangs and seen[0] == 3 else 0.0

    split = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    text = recorded(jobs, split, "unified", routing="round_robin", pages=64, rows=8, rest=600.0, late=late)
    assert '"hang"' in text
    check_replay(text)


def test_steps_record_their_predicted_times() -> None:
    """The scheduler's model equals that of the devices."""
    outcome = replay(recorded([Job(range(30), 6), Job(range(50, 59), 3)], "1x1", "distserve").splitlines(), perf)
    assert len(outcome.steps) > 5
    assert [step.predicted for step in outcome.steps] == pytest.approx([step.seconds for step in outcome.steps])


def test_a_changed_plan_shows_as_a_difference() -> None:
    jobs = [Job(range(100 * i, 100 * i + 12), 6) for i in range(6)]
    lines = recorded(jobs, "1x1", "distserve").splitlines()
    for index, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] == "planned" and len(record["plan"][1]) > 1:
            record["plan"][1][0][3] += 1
            lines[index] = json.dumps(record)
            break
    (difference,) = replay(lines, perf).differences
    assert difference.line == index + 1 and difference.instance == "mixed0"


def test_no_prompt_is_journaled() -> None:
    text = recorded([Job([424242] * 12, 3)], "1x1", "distserve")
    assert "424242" not in text


def test_what_was_asked_is_journaled_whole() -> None:
    """A new field of NewRequest needs no line in the journal."""
    asked = NewRequest(
        (5,) * 9, SamplingParams(max_tokens=2, stop=["x"]), SLO(1.0, 0.5, stages=((THINKING, 0.1),)), priority=3,
        tier="gold", key="mine", client="me", salt=b"s", session="a session", waited=1.0,
        progress=Progress((7,), 0.2, 0.1), handed_over=True, kv_from="unix:/there", kv_tokens=8,
    )  # fmt: skip
    plain = NewRequest((), SamplingParams(), SLO())
    secret = ("prompt", "salt", "waited", "progress")
    assert all(getattr(asked, one.name) != getattr(plain, one.name) for one in fields(NewRequest)), (
        "set the new field too"
    )
    header, *_ = recorded([Job(range(9), 4)], "1x1", "kairos").splitlines()
    file = io.StringIO()
    log = Journal(file).instance("mixed0", policy="fcfs", limits=LIMITS, role=Role.MIXED, prefix_caching=True, perf={})
    request = Request(4, asked, 2.0, seed=8)
    request.tier = BEST_EFFORT
    log("add", request=request)
    seen = replay([header, file.getvalue().splitlines()[1]], perf).requests[4]
    assert (seen.key, seen.tier, seen.seed, seen.arrival, seen.prompt_length) == ("mine", BEST_EFFORT, 8, 2.0, 9)
    assert replace(seen.asked, **{name: getattr(asked, name) for name in secret}) == asked


def test_a_malformed_line_is_named() -> None:
    with pytest.raises(InvalidValue, match="line 1 is not JSON"):
        replay(["{"], perf)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("plan", "now", float("nan")), ("plan", "now", 1e308), ("plan", "now", None), ("plan", "at", "\x1b[31mnone"),
     ("settle", "result", []), ("add", "request", {}), ("add", "predicted", "soon"),
     ("instance", "role", "<b>"), ("digest", "digest", "zz"),
     ("release", "id", 10**30)],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_named(kind: str, field: str, value: Any) -> None:
    lines = recorded(
        [Job(range(1000 * i, 1000 * i + 20), 6, 0.01 * i) for i in range(4)], "2x1", "distserve"
    ).splitlines()
    at = next(at for at, line in enumerate(lines) if json.loads(line)["kind"] == kind)
    lines[at] = json.dumps({**json.loads(lines[at]), field: value})
    with pytest.raises(InvalidValue, match=r"journal line \d+: the record '\w+' cannot be replayed") as error:
        replay(lines, perf)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("version", [1, None, 99])
def test_a_journal_of_another_version_is_refused(version: int | None) -> None:
    first, *others = recorded([Job(range(9), 4)], "1x1", "kairos").splitlines()
    record = json.loads(first)
    del record["version"]
    with pytest.raises(InvalidValue, match=rf"line 1: version={version or 1} must be \d+; record"):
        replay([json.dumps(record if version is None else {**record, "version": version}), *others], perf)


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_truncated_last_line_is_ignored(kept: int) -> None:
    """A killed process or a full disk truncates the last line."""
    lines = recorded([Job(range(9), 4, 0.0), Job(range(12), 3, 0.1)], "2x1", "kairos").splitlines()
    whole, cut = lines[: len(lines) // 2], lines[len(lines) // 2][:kept]
    outcome = replay([*whole, cut], perf)
    assert outcome.differences == [] and outcome.plans == replay(whole, perf).plans > 0
    with pytest.raises(InvalidValue, match=f"line {len(whole) + 1} is not JSON"):
        replay([*whole, cut, *lines[len(whole) + 1 :]], perf)
