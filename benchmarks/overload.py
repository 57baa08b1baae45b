"""Measure the cost of a long queue: planning time and simulated tokens per second by policy and queue length.

    python benchmarks/overload.py                                  # best-effort requests wait: a table and JSON
    python benchmarks/overload.py --objectives --waiting 300 3000  # requests with the default objectives wait
    python benchmarks/overload.py --policies unified --rows 8

One mixed instance runs `--rows` decodes while the queue is kept at `--waiting` requests. Step times are those of an 8B
model on one accelerator. As in the engine, a step is planned `--lead` seconds before the previous one ends; a plan that
takes longer delays the step by the excess. `plan` is the CPU time of Scheduler.plan, `decide` the policy's part.
`serial share` assumes that no plan overlaps a step, a pessimistic bound for any engine.
"""

from __future__ import annotations

import argparse
import time
from math import inf
from typing import Any

import common
import numpy as np

from jaxserve.report.table import print_table
from jaxserve.sched import policies
from jaxserve.sched.api.new_request import STANDARD, NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import StepResult
from jaxserve.sched.api.policy import Decision, Limits, Policy, Role, View
from jaxserve.sched.api.request import BEST_EFFORT, Request
from jaxserve.sched.api.slo import NO_SLO, SLO
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf.model import Coefficients, GeneralModel

COEFFICIENTS = Coefficients(fixed=5e-3, prefill=2e-5, decode=1e-5, quadratic=1e-10, longest=1e-8, context=1e-8)
PAGE = 16
LEAST = 0.95  # minimum share of the tokens per second with the shortest queue
PROMPT, OUTPUT = 64, 64  # tokens


class Timed:
    """A wrapper that sums the CPU time of a policy. Writer: `decide`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seconds = 0.0

    def decide(self, view: View) -> Decision:
        began = time.process_time()
        decision = self._policy.decide(view)
        self.seconds += time.process_time() - began
        return decision


class Overload:
    """A scheduler whose queue is kept at a fixed number of waiting requests. Writer: `step`."""

    def __init__(self, name: str, rows: int, waiting: int, *, objectives: bool) -> None:
        self.policy = Timed(policies.make(name))
        limits = Limits(tokens=2048, rows=rows, pages=rows * 3 * (PROMPT + OUTPUT) // PAGE, page_size=PAGE)
        self.scheduler = Scheduler(self.policy, GeneralModel(COEFFICIENTS), limits, Role.MIXED, prefix_caching=False)
        self._total = rows + waiting
        self._objectives = objectives
        self._random = np.random.default_rng(0)
        self.count = 0
        self.now = 0.0
        self.tokens = 0

    def _arrive(self) -> None:
        prompt, output = (int(self._random.integers(n // 2, n * 3 // 2)) for n in (PROMPT, OUTPUT))
        tier, slo = (STANDARD, SLO()) if self._objectives else (BEST_EFFORT, NO_SLO)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add(
            Request(self.count, NewRequest(range(prompt), params, slo, tier=tier), self.now, seed=self.count)
        )
        self.count += 1

    def step(self) -> tuple[float, float]:
        """Run one step, and return its seconds (0 if nothing ran) and the CPU seconds of its plan."""
        while len(self.scheduler) < self._total:
            self._arrive()
        began = time.process_time()
        plan = self.scheduler.plan(self.now, self.now)
        planned = time.process_time() - began
        if plan is None:
            self.now += 1e-3
            return 0.0, planned
        seconds, started = self.scheduler.predicted, self.now
        self.now += seconds
        tokens = tuple((7,) if span.samples else () for span in plan.spans)
        self.tokens += sum(map(len, tokens))
        self.scheduler.settle(StepResult(plan.step, started, self.now, tokens))
        return seconds, planned


def measure(name: str, rows: int, waiting: int, steps: int, lead: float, *, objectives: bool) -> dict[str, Any]:
    """Return means over `steps` steps, after the same number of warm-up steps."""
    run = Overload(name, rows, waiting, objectives=objectives)
    for _ in range(steps):
        run.step()
    run.tokens, run.policy.seconds = 0, 0.0
    timed = np.array([run.step() for _ in range(steps)])
    seconds, planned = timed.T
    return {
        "policy": name,
        "rows": rows,
        "waiting": waiting,
        "steps": steps,
        "decide_ms": 1e3 * run.policy.seconds / steps,
        "plan_ms": 1e3 * float(planned.mean()),
        "tokens_per_s": run.tokens / float((seconds + np.maximum(0.0, planned - lead)).sum()),
        "serial_tokens_per_s": run.tokens / float((seconds + planned).sum()),
    }


def compared(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one policy at every queue length: the minimum of `--repeats`, since other load only adds time."""
    found = []
    for waiting in args.waiting:
        many = [
            measure(name, args.rows, waiting, args.steps, args.lead, objectives=args.objectives)
            for _ in range(args.repeats)
        ]
        found.append(min(many, key=lambda row: float(row["plan_ms"])))
    for row in found:
        row["share"] = row["tokens_per_s"] / found[0]["tokens_per_s"]
        row["serial_share"] = row["serial_tokens_per_s"] / found[0]["serial_tokens_per_s"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=policies.names())
    parser.add_argument("--waiting", nargs="+", type=int, default=[300, 3000, 10000], metavar="N")
    parser.add_argument("--rows", type=int, default=64, help="max_num_seqs of the instance [%(default)s]")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lead", type=float, default=3e-3, metavar="SECONDS", help="[%(default)s]")
    parser.add_argument(
        "--objectives", action="store_true", help="requests have the default objectives instead of best effort"
    )
    parser.add_argument("--repeats", type=int, default=1, metavar="N")
    common.add_output(parser, "overload")
    args = parser.parse_args()
    rows = [row for name in args.policies for row in compared(name, args)]
    titles = ["policy", "waiting", "decide ms", "plan ms", "tokens/s", "share", "serial share"]
    keys = ["policy", "waiting", "decide_ms", "plan_ms", "tokens_per_s", "share", "serial_share"]
    print_table(f"{args.rows} running decodes", titles, [[row[key] for key in keys] for row in rows])
    worst = min((row["share"] for row in rows), default=inf)
    print(f"least share of the tokens per second at {args.waiting[0]} waiting: {worst:.3f} (at least {LEAST} wanted)")
    common.save(args, {"rows": rows, "least_share": worst})
    return int(worst < LEAST)


if __name__ == "__main__":
    raise SystemExit(main())
