"""The count of running decodes that wait for another step, which is what slack-guided decode does."""

from __future__ import annotations

import pytest

from jaxserve.sched.api.plan import StepPlan
from jaxserve.sched.api.request import State
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.sim import Mesh, simulate
from tests.support.sched.presets import CHAT, TINY


@pytest.mark.parametrize(("policy", "mesh"), [("flowprefill", Mesh(1, colocated=True)), ("kairos", Mesh(2))])
def test_decodes_without_a_token_in_a_step_are_counted(
    policy: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, plan = list[int](), Scheduler.plan

    def counting(self: Scheduler, now: float, start: float) -> StepPlan | None:
        decode = self._queues.decode
        running = [one for one, runs in zip(decode, decode.running, strict=True) if runs]
        made = plan(self, now, start)
        if made is not None and made.resume is None:
            planned = {span.request for span in made.spans}
            counts.append(sum(one.id not in planned and one.state is State.RUNNING for one in running))
        return made

    monkeypatch.setattr(Scheduler, "plan", counting)
    report = simulate(CHAT, policy, mesh, TINY, qps=60, num_requests=60)
    assert report.counters.left_out == sum(counts) > 0
