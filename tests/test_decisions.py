"""scripts/decisions finds a changed plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from jaxserve.sched.api.policy import Decision, View
from jaxserve.sched.policies.ordered import Ordered


@pytest.fixture
def decisions(load_file: Callable[[str], ModuleType]) -> ModuleType:
    return load_file("scripts/decisions.py")


def test_a_changed_plan_is_found(
    decisions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The change: one decision in the middle of a run schedules no token of the first prompt."""
    path, asked = tmp_path / "before.txt", [0]
    assert decisions.main(["sjf", "least_work", "colocated", "--out", str(path)]) == 0
    assert decisions.main(["sjf", "least_work", "colocated", "--compare", str(path)]) == 0
    plain = Ordered.decide

    def late(self: Ordered, view: View) -> Decision:
        decision = plain(self, view)
        asked[0] += len(decision.grants) > 1
        return Decision(decision.grants[1:]) if asked[0] == 10 and len(decision.grants) > 1 else decision

    monkeypatch.setattr(Ordered, "decide", late)
    assert decisions.main(["sjf", "least_work", "colocated", "--compare", str(path)]) == 1
    out = capsys.readouterr().out
    assert "\nsjf least_work colocated: " in f"\n{out}" and "1 combinations, 1 differ" in out


def test_every_field_of_a_span_is_hashed(decisions: ModuleType) -> None:
    from jaxserve.sched.api.params import SamplingParams
    from jaxserve.sched.api.plan import Begin, Span

    begin = Begin(SamplingParams(), 1, (), (), 5, (2,))
    span = Span(1, 2, 3, 4, (5,), (6,), 0, False, begin)
    changed = {"request": 9, "slot": 9, "start": 9, "length": 9, "new_pages": (9,), "tokens": (9,), "draft": 9}
    changes = [{name: value} for name, value in changed.items()] + [{"samples": True}, {"begin": None}]
    digests = {decisions.numbers(span)} | {decisions.numbers(span._replace(**change)) for change in changes}
    assert len(digests) == 1 + len(changes) == 1 + len(span)
