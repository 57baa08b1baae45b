"""scripts/decisions finds a changed plan, and nothing if all plans are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.sched.api.policy import Decision, View
from jaxserve.sched.policies.ordered import Ordered

ONE = ("kairos", "deflect", "tiers")


@pytest.fixture
def decisions(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("scripts/decisions.py")


def test_equal_runs_are_equal(decisions: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "before.txt"
    assert decisions.main([*ONE, "--out", str(path)]) == 0
    (key,) = decisions.read(path)
    assert key == ONE and decisions.read(path)[key].steps > 50
    assert path.read_text().startswith("# scripts/decisions --out FILE: 1 combinations")
    assert decisions.main([*ONE, "--compare", str(path)]) == 0
    assert "1 combinations, 0 differ" in capsys.readouterr().out


def test_a_changed_plan_is_found(
    decisions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change: one decision in the middle of a run schedules no token of the first prompt."""
    path, asked = tmp_path / "before.txt", [0]
    assert decisions.main(["sjf", "least_work", "--out", str(path)]) == 0
    plain = Ordered.decide

    def late(self: Ordered, view: View) -> Decision:
        decision = plain(self, view)
        asked[0] += len(decision.grants) > 1
        return Decision(decision.grants[1:]) if asked[0] == 10 and len(decision.grants) > 1 else decision

    monkeypatch.setattr(Ordered, "decide", late)
    assert decisions.main(["sjf", "least_work", "colocated", "--compare", str(path)]) == 1
    out = capsys.readouterr().out
    assert "\nsjf least_work colocated: " in f"\n{out}" and "1 combinations, 1 differ" in out


def test_refused_and_one_sided_cases_are_differences(decisions: ModuleType) -> None:
    refused = decisions.decide("kairos:nonsense", "least_work", "split")
    assert refused == decisions.Decided(0, "refused")
    one = decisions.Decided(3, "ab")
    found = decisions.differences({("a", "b", "c"): one, ("d", "e", "f"): one}, {("a", "b", "c"): refused})
    assert list(found) == ["a b c: 3 steps ab before, 0 steps refused after", "d e f: only before"]
    assert list(decisions.differences({ONE: refused}, {ONE: refused})) == []


def test_every_field_of_a_span_is_hashed(decisions: ModuleType) -> None:
    from jaxserve.sched.api.params import SamplingParams
    from jaxserve.sched.api.plan import Begin, Span

    begin = Begin(SamplingParams(), 1, (), (), 5, (2,))
    span = Span(1, 2, 3, 4, (5,), (6,), 0, False, begin)
    changed = {"request": 9, "slot": 9, "start": 9, "length": 9, "new_pages": (9,), "tokens": (9,), "draft": 9}
    changes = [{name: value} for name, value in changed.items()] + [{"samples": True}, {"begin": None}]
    digests = {decisions.numbers(span)} | {decisions.numbers(span._replace(**change)) for change in changes}
    assert len(digests) == 1 + len(changes) == 1 + len(span)


def test_the_script_has_help_and_lists_combinations(repo: Path) -> None:
    script, env = str(repo / "scripts" / "decisions"), {**os.environ, "PYTHON": sys.executable}
    helped = subprocess.run([script, "--help"], capture_output=True, text=True, env=env)
    assert helped.returncode == 0 and "scripts/decisions --compare before.txt" in helped.stdout
    wrong = subprocess.run([script, "nothing"], capture_output=True, text=True, env=env)
    assert wrong.returncode == 2 and "no combination has 'nothing'" in wrong.stderr and "kairos" in wrong.stderr
