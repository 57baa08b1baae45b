"""A replayed journal reproduces its plans, and a changed policy shows as differences."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.journal import replay
from tests.support.examples import examples
from tests.support.sched.complete import JOB, ROLES
from tests.support.sched.harness import Job
from tests.support.sched.recorded import perf, recorded


@given(
    jobs=st.lists(JOB, min_size=1, max_size=8),
    roles=st.sampled_from(list(ROLES)),
    policy=st.sampled_from(["distserve", "kairos"]),
    every=st.sampled_from([4, 7, 10_000]),
)
@settings(max_examples=examples(60))
def test_replay_reproduces_every_plan(jobs: list[Job], roles: str, policy: str, every: int) -> None:
    text = recorded(jobs, roles, policy, every)
    outcome = replay(text.splitlines(), perf)
    assert outcome.differences == []
    assert outcome.plans == text.count('"kind":"planned"')


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


def test_a_malformed_line_is_named() -> None:
    with pytest.raises(InvalidValue, match="line 1 is not JSON"):
        replay(["{"], perf)


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
