"""What deciding costs: CPU time of one step's `decide` and `plan`, by policy and by number of requests.

A mixed instance is kept at so many running and waiting requests: about one ends in each step, and one arrives for
it. `recompute` is a decision with nothing kept from earlier steps: every table of the instance is filled anew.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, field

import common
import numpy as np

from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.params import SamplingParams
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.plan import StepPlan, StepResult
from jaxserve.sched.policy import Decision, Limits, Policy, Role, View
from jaxserve.sched.request import Request
from jaxserve.sched.roster import Roster
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo import SLO

# About an 8B model on one large accelerator; the cost of deciding does not depend on them.
COEFFICIENTS = Coefficients(fixed=5e-3, prefill=2e-5, decode=1e-5, quadratic=1e-10, longest=1e-8, context=1e-8)
PAGE = 16


@dataclass
class Timed:
    """A policy that notes its own CPU time. Writer: `decide`."""

    policy: Policy
    seconds: list[float] = field(default_factory=list)
    view: View | None = None

    def decide(self, view: View) -> Decision:
        began = time.process_time()
        decision = self.policy.decide(view)
        self.seconds.append(time.process_time() - began)
        self.view = view
        return decision


class Steady:
    """A scheduler held at `running` and `waiting` requests by arrivals for every end."""

    def __init__(self, name: str, running: int, waiting: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.policy = Timed(policies.make(name))
        self.total = running + waiting
        self.running = running
        self.now = 0.0
        self.count = 0
        pages = running * (4096 + 1024) // PAGE
        limits = Limits(tokens=8192, rows=running, pages=pages, page_size=PAGE)
        self.scheduler = Scheduler(self.policy, GeneralModel(COEFFICIENTS), limits, Role.MIXED, prefix_caching=False)

    def arrive(self) -> None:
        """One request: 32 to 4096 tokens, an output of about as many steps as there are rows."""
        prompt = int(np.exp(self.random.uniform(np.log(32), np.log(4096))))
        output = int(self.random.integers(self.running // 2, self.running * 3 // 2)) + 1
        slo = SLO(ttft=float(self.random.uniform(0.5, 8)), tpot=float(self.random.uniform(0.02, 0.1)))
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add(Request(self.count, range(prompt), params, slo, self.now, seed=self.count))
        self.count += 1

    def step(self) -> float | None:
        """One step with its arrivals; CPU seconds of `plan`, None where nothing could run."""
        while len(self.scheduler) < self.total:
            self.arrive()
        began = time.process_time()
        plan = self.scheduler.plan(self.now, self.now)
        seconds = time.process_time() - began
        if plan is None:
            self.now += 0.01
            return None
        self.settle(plan)
        return seconds

    def settle(self, plan: StepPlan) -> None:
        started, self.now = self.now, self.now + self.scheduler.predicted
        tokens = tuple((7,) if span.samples else () for span in plan.spans)
        self.scheduler.settle(StepResult(plan.step, started, self.now, tokens))

    def recompute(self) -> float:
        """CPU seconds of a decision whose tables are filled from nothing."""
        began = time.process_time()
        roster = Roster(Role.MIXED)
        for request in self.scheduler:
            roster.file(request)
        view = View(
            now=self.now,
            start=self.now,
            role=Role.MIXED,
            prefill=roster.prefill,
            decode=roster.decode,
            limits=self.scheduler.limits,
            free_pages=self.scheduler.blocks.available,
            kv_waiting=0,
            perf=self.scheduler.perf,
        )
        self.policy.policy.decide(view)
        return time.process_time() - began


def measure(name: str, running: int, waiting: int, steps: int) -> dict[str, object]:
    """Milliseconds of CPU time over `steps` steps, after as many again to reach the steady state."""
    steady = Steady(name, running, waiting)
    for _ in range(max(steps, 3 * running)):
        steady.step()
    steady.policy.seconds.clear()
    gc.collect()
    gc.freeze()
    gc.disable()
    plans = [spent for _ in range(steps) if (spent := steady.step()) is not None]
    again = [steady.recompute() for _ in range(max(5, steps // 10))]
    gc.enable()
    gc.unfreeze()
    decode = steady.policy.view.decode if steady.policy.view else ()
    found: dict[str, object] = {"policy": name, "running": running, "waiting": waiting, "steps": len(plans)}
    found["decoding_in_last_view"] = len(decode)
    for label, seconds in (("decide", steady.policy.seconds), ("plan", plans), ("recompute", again)):
        values = np.array(seconds) * 1e3
        found[f"median_{label}_ms"] = float(np.median(values))
        found[f"p99_{label}_ms"] = float(np.percentile(values, 99))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=policies.names())
    parser.add_argument("--sizes", nargs="+", default=["64+256", "512+4096"], metavar="RUNNING+WAITING")
    parser.add_argument("--steps", type=int, default=300)
    common.add_output(parser, "scheduler_cost")
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        running, waiting = map(int, size.split("+"))
        rows += [measure(name, running, waiting, args.steps) for name in args.policies]
    titles = ["policy", "running", "waiting", "decide", "p99", "plan incl. decide", "p99 ", "recompute", "p99  "]
    keys = ["policy", "running", "waiting"]
    keys += [f"{s}_{label}_ms" for label in ("decide", "plan", "recompute") for s in ("median", "p99")]
    print_table("CPU ms per step: median and 99th percentile", titles, [[row[key] for key in keys] for row in rows])
    common.save(args, {"rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
