"""`jaxserve replay` shows a served run as `simulate` shows a simulated one."""

from __future__ import annotations

import gzip
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.replay import perf_of
from jaxserve.sched.journal import Journal, replay
from jaxserve.sched.perf.recipe import Recipe
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import trace, transfers
from jaxserve.sched.sim import Options, simulate
from tests.support.parity.asks import ROOMY, asks, setup
from tests.support.sched.harness import Job
from tests.support.sched.presets import CHAT, TINY
from tests.support.sched.recorded import journaled, perf, recorded


def replayed(text: str, make: Any = perf) -> Recorder:
    recorder = Recorder()
    assert replay(text.splitlines(), make, recorder).differences == []
    return recorder


def test_a_journal_of_real_executors_has_every_step_move_and_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two instances prefill and two decode; the journal is that of a run on devices."""
    file = tmp_path / "run.jsonl"
    with file.open("w") as lines:
        served, _ = setup("4x2", 64, ROOMY).run(asks(1), "kairos", journal=Journal(lines))
    text = file.read_text()
    recorder = replayed(text, perf_of)
    assert len(recorder.stretches) == text.count('"kind":"settle"') > 20
    moves = transfers(recorder)
    assert len(moves) == text.count('"kind":"accept"') > 0
    for move in moves:
        times = recorder.requests[move.request].token_times
        assert times[0] <= move.start <= move.end <= times[1], "KV leaves after the first token, before the second"
    for name in recorder.limits:
        own = sorted((one.start, one.end) for one in recorder.stretches if one.instance == name)
        assert all(end <= start for (_, end), (start, _) in pairwise(own)), "steps of an instance do not overlap"
    levels = [level.at for level in recorder.levels]
    assert levels == sorted(levels)

    steps, longest = tmp_path / "steps.json.gz", max(served, key=lambda one: len(one.output))
    words = ["replay", str(file), "--no-simulate", "--timeline", str(steps), "--explain", str(longest.id)]
    assert main(words) == 0
    events = json.loads(gzip.decompress(steps.read_bytes()))["traceEvents"]
    assert {one["ph"] for one in events} == set("MXCstf")
    printed = capsys.readouterr().out
    assert f"Request {longest.id}" in printed and f"{len(longest.output)} tokens out" in printed
    assert f"wrote {steps}: open it on https://ui.perfetto.dev" in printed


@pytest.mark.parametrize("roles", ["1x1", "4x1"])
def test_a_replay_shows_what_the_run_was(roles: str) -> None:
    """The record of a replay is that of the run itself, as far as a journal tells times."""
    jobs = [Job(range(1000 * i, 1000 * i + 5 + i % 9), 4 + i % 5, i * 0.01) for i in range(30)]
    text = recorded(jobs, roles, "kairos")
    recorder = replayed(text)
    events = trace(recorder)["traceEvents"]
    assert sum(one.get("cat") == "step" for one in events) == text.count('"kind":"settle"')
    assert len(recorder.placed) >= len(jobs) and len(recorder.requests) == len(jobs)
    for at, _, id, _, _ in recorder.placed:
        assert at >= recorder.requests[id].arrival


@pytest.mark.parametrize(("policy", "admission"), [("unified", "none"), ("distserve", "dp")])
def test_predictions_and_demotions_are_those_of_the_run(policy: str, admission: str) -> None:
    file, run, recipe = io.StringIO(), Recorder(), Recipe("general", coefficients=TINY.coefficients)
    simulate(
        CHAT, policy, "2x1", TINY, qps=500, num_requests=80, options=Options(admission=admission),
        logs=journaled(file, recipe), recorder=run,
    )  # fmt: skip
    text = file.getvalue()
    again = replayed(text)
    assert again.predicted == run.predicted and len(run.predicted) > 40
    assert again.demoted.keys() == run.demoted.keys() and run.demoted
    for id, one in run.demoted.items():
        found = again.demoted[id]
        assert found._replace(at=one.at) == one and found.at == pytest.approx(one.at), "all but the clock is derived"
        [line] = [line for line in explain(again, id) if "became best effort" in line]
        assert ("admission control" in line) == (admission == "dp")
    older = [json.dumps({key: value for key, value in json.loads(line).items() if key != "predicted"})
             for line in text.splitlines()]  # fmt: skip
    assert replayed("\n".join(older)).predicted == {}


def test_a_wrong_request_or_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "run.jsonl"
    journal.write_text(recorded([Job(range(12), 6, 1.0)], "1x1", "kairos"))
    asked = ["replay", str(journal), "--no-simulate"]
    assert main([*asked, "--explain", "nine"]) == 2
    assert "explain='nine' must be a request's number, " in capsys.readouterr().err
    assert main([*asked, "--timeline", str(journal / "x.json")]) == 2
    assert "timeline=" in capsys.readouterr().err and not (tmp_path / "x.json").exists()
    assert main([*asked, "--explain", "missed"]) == 0
    assert "1 requests" in (printed := capsys.readouterr().out) and ("missed" in printed or "Missed" in printed)
