"""Multi-host instances in several processes that each hold a share of the devices; only devices are emulated.

Steps are stopped at random, no process waits for another forever, and tokens equal those of one
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.programs.inputs import SlotTable
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.host_messages import (
    End,
    Facts,
    Failed,
    Over,
    Pool,
    Rebuild,
    Score,
    Segment,
    decode_from_follower,
    encode,
)
from jaxserve.engine.runtime.hosts import Leading, OutOfStep, follow
from jaxserve.engine.startup.calls import idle_batch
from jaxserve.sched.api.errors import InvalidValue
from tests.support.engine.host import DRAFTS, LONG, NEW, PARAMS, PROMPTS, REPEATED, WRONG, Case, pooled
from tests.support.engine.mixed import jobs_of
from tests.support.engine.steps import Job, alone, executors, run
from tests.support.examples import cases
from tests.support.server.processes import free_ports
from tests.support.wire import connected

LIMIT = 200  # seconds until processes that wait for each other are killed


@pytest.fixture(scope="module")
def expected(executor: JaxExecutor, pair: list[JaxExecutor]) -> list[list[int]]:
    """Return the tokens of each request alone in whole steps, on one device and on two devices of one process."""
    found = [[alone(one, job, NEW) for job in jobs_of(PROMPTS, PARAMS)] for one in (executor, pair[0])]
    assert found[0] == found[1]
    return found[0]


def together(case: Case, repo: Path, folder: Path) -> tuple[dict[str, Any], list[int], list[str]]:
    """Return the leader's output, and of each process its exit status and errors."""
    running, logs = [], [folder / f"host{rank}.log" for rank in range(case.processes)]
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "tests.support.engine.host", json.dumps(asdict(replace(case, rank=rank)))]
            with log.open("w") as errors:
                out = subprocess.PIPE if rank == 0 else errors
                running.append(subprocess.Popen(command, cwd=repo, stdout=out, stderr=errors, text=True))
        said = running[0].communicate(timeout=LIMIT)[0]
        status = [process.wait(30) for process in running]
    finally:
        for process in running:
            process.kill()  # jax catches SIGTERM
            process.wait()
    texts = [log.read_text() for log in logs]
    lines = [line for line in said.splitlines() if line.startswith("{")]  # gloo prints too
    assert len(lines) == 1, (said, *texts)
    return json.loads(lines[0]), status, texts


def case(tiny: Path, **options: Any) -> Case:
    meeting, leader = free_ports(2)
    settings = {"processes": 2, "devices": 1, "boundary": "op", "seed": 0} | options
    return Case(folder=str(tiny), rank=0, meeting=meeting, leader=leader, **settings)


BARE = [(2, 1, "op", 0)]
EVERY = [(*sizes, seed) for sizes in ((2, 1, "op"), (2, 1, "layer"), (2, 2, "op")) for seed in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "boundary", "seed"), cases(BARE, EVERY, apart=True))
def test_hosts_stop_and_resume_together(
    tiny: Path, executor: JaxExecutor, expected: list[list[int]], repo: Path, tmp_path: Path,
    processes: int, devices: int, boundary: str, seed: int,
) -> None:  # fmt: skip
    one = case(tiny, processes=processes, devices=devices, boundary=boundary, seed=seed)
    told, status, texts = together(one, repo, tmp_path)
    assert status == [0] * processes, texts
    assert told["rounds"] == [expected] * 2
    assert min(told["stops"]) > 0
    for sums, alone_ in zip(told["pooled"], run(pooled(executor)), strict=True):
        assert sums == pytest.approx(alone_, abs=1e-4)


@pytest.mark.full
def test_hosts_draft_together(tiny: Path, executor: JaxExecutor, repo: Path, tmp_path: Path) -> None:
    told, status, texts = together(case(tiny, what=DRAFTS), repo, tmp_path)
    assert status == [0, 0], texts
    assert told["output"] == alone(executor, Job(REPEATED), LONG)
    assert told["steps"] < LONG  # some drafts were accepted


@pytest.mark.full
def test_a_wrong_segment_index_ends_the_follower_and_its_leader_reports_why(
    tiny: Path, repo: Path, tmp_path: Path
) -> None:
    told, (leader, follower), texts = together(case(tiny, what=WRONG), repo, tmp_path)
    assert "received segment 3 of walk 1, but segment 1 is next here" in told["error"]
    assert leader == 0 and follower != 0
    assert "OutOfStep: received segment 3" in texts[1]


# One follower on one device


@pytest.fixture(scope="module")
def cut(tiny: Path) -> JaxExecutor:
    """An executor with two layers and four segments."""
    return executors(tiny, preempt_boundary="op", warm=False)[0]


def told(state: Any, *messages: Any) -> tuple[BaseException | None, str | None]:
    """Send messages to a follower; return its exception and the error that its leader receives.

    The last message is wrong, or Over. Without messages the leader disconnects.
    """
    here, there = connected()
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            follow(state, there)
            raised.append(None)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    facts = decode_from_follower(here.receive())
    assert isinstance(facts, Facts) and facts.segments.startswith("((Link(")
    for message in messages:
        here.send(encode(message))
    heard: str | None = None
    if messages and messages[-1] != Over():
        failed = decode_from_follower(here.receive())
        assert isinstance(failed, Failed)
        heard = failed.why
    elif not messages:
        here.close()
    thread.join(60)
    here.close()
    (error,) = raised
    return error, heard


def test_a_follower_refuses_messages_out_of_order(cut: JaxExecutor) -> None:
    limits = cut.state.programs.limits
    prompt, decode = limits.buckets[-1], limits.buckets[0]
    batch, whole = (idle_batch(bucket, SlotTable(limits), full=False) for bucket in (prompt, decode))
    begun = [Segment(7, 0, batch), Segment(7, 1, None)]
    rest = [Segment(7, 2, None), Segment(7, 3, None)]
    assert told(cut.state, *begun, *rest, End(7, ()), Segment(8, 0, batch), Rebuild(), Over()) == (None, None)
    wrong: list[tuple[Any, str]] = [
        (Segment(7, 3, None), "received segment 3 of walk 7, but segment 2 is next here"),
        (Segment(7, 1, None), "received segment 1 of walk 7, but segment 2 is next here"),
        (Segment(7, 0, batch), "received segment 0 of walk 7, but segment 2 is next here"),
        (Segment(8, 2, None), r"received segment 2 of walk 8; in progress here are \[7\]"),
        (Segment(8, 0, whole), r"received segment 0 of walk 8; in progress here are \[7\]"),
        (End(7, ()), "received the end of walk 7, but segment 2 of 4 is next here"),
        (Score(0, np.zeros(1, np.int32)), "received a prompt to score, but the last dispatch was not a step"),
        (Pool(((0, 1),)), "received parts to sum, but the last dispatch was not a step"),
    ]
    for message, why in wrong:
        error, heard = told(cut.state, *begun, message)
        with pytest.raises(OutOfStep, match=why):
            raise error or AssertionError("nothing was raised")
        assert heard == f"process 0: OutOfStep: {error}"
    error, _ = told(cut.state, *begun, *rest, Segment(7, 4, None))
    assert "received segment 4 of walk 7, but its end is next here" in str(error)


def test_a_leader_that_disconnects_is_noticed(cut: JaxExecutor) -> None:
    error, _ = told(cut.state)
    assert isinstance(error, OutOfStep) and "the leader closed its connection" in str(error)


def test_a_leader_accepts_as_many_followers_as_its_mesh_has_processes(cut: JaxExecutor) -> None:
    here, there = connected()
    with closing(here), closing(there), pytest.raises(InvalidValue, match="1 followers for a mesh over 1 processes"):
        Leading(cut.state, [here])
