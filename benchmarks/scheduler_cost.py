"""Measure the CPU time of scheduling: `decide` and `plan` of one step, by policy and number of requests.

A mixed instance is kept at a fixed number of running and waiting requests: when a request ends, another arrives, about
one per step, or fewer if outputs are longer than the number of rows (`--answer`). `in a step` is the number of requests
that a decision puts in a step; larger decisions take longer. `quiet` and `event` are the times of `plan` in steps
without and with a new request since the previous step (those of `decide` are in the JSON). `observe` is the time in
which the step-time model learns from a step; `decide` and `plan` exclude it. `recompute` is a decision without state
from earlier steps, so that every table of the instance is rebuilt.

Two further tables: the cost to route one request, redirects included, among full instances, and the cost of one run of
the DP of SLOs-Serve.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import common
import numpy as np

from jaxserve.report.table import print_table
from jaxserve.sched import policies, routing
from jaxserve.sched.api.instance_view import ReadOnlyView
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.plan import StepPlan, StepResult
from jaxserve.sched.api.policy import Decision, Limits, Policy, Role, View
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.block_pool import BlockPool
from jaxserve.sched.instance.kv_manager import KVManager
from jaxserve.sched.instance.prefix_hits import PrefixHits
from jaxserve.sched.instance.request_queues import RequestQueues
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.perf import registry
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.model import Coefficients, GeneralModel
from jaxserve.sched.perf.registry import KINDS
from jaxserve.sched.policies.slos_serve.commitments import idle_of, prompts_of, standing_of, terms_of
from jaxserve.sched.policies.slos_serve.dp import admitted
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.routing.base import Fleet

# Roughly an 8B model on one large accelerator; the measured CPU time does not depend on them.
COEFFICIENTS = Coefficients(fixed=5e-3, prefill=2e-5, decode=1e-5, quadratic=1e-10, longest=1e-8, context=1e-8)
PAGE = 16
PERF = "learned"
NOISE = 0.05  # relative noise of simulated steps, so that the step-time model has something to learn
PROMPTS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BUCKETS = Buckets((1, 4, 8, 16, 32, 64, 128, 256, 512), PROMPTS)  # sizes that an engine pads to
VARIANTS = [
    "fairbatching:anchor=arrival",
    "fairbatching:budget=fixed",
    "fairbatching:budget=tokens",
    "fairbatching:on_time_set",
    "flowprefill:batch=0",
    "flowprefill:literal",
    "kairos:literal",
    "kairos:quadratic",
    "kairos:verbatim",
    "prefill=sedf,decode=kairos",
    "sarathi:tokens=512",
    "sedf:ageing=0.1",
    "slos_serve:no_admit",
    "slos_serve:no_dynamic",
]
PLACED = [*ROUTERS, "deflect:faster", "deflect:dropped"]


@dataclass
class Timed:
    """A wrapper that records the CPU time of a policy's decisions. Writer: `decide`."""

    policy: Policy
    seconds: list[float] = field(default_factory=list)
    granted: list[int] = field(default_factory=list)  # requests in each step
    view: View | None = None

    def decide(self, view: View) -> Decision:
        began = time.process_time()
        decision = self.policy.decide(view)
        self.seconds.append(time.process_time() - began)
        self.granted.append(len(decision.grants))
        self.view = view
        return decision


class Steady:
    """A scheduler kept at `running` plus `waiting` requests: an arrival replaces each request that ends."""

    def __init__(
        self, name: str, running: int, waiting: int, answer: int = 0, classes: int = 0, perf: str = PERF
    ) -> None:
        self.random = np.random.default_rng(0)
        self.answer = answer or running
        self.slos = [self.slo() for _ in range(classes)]
        self.policy = Timed(policies.make(name))
        self.total = running + waiting
        self.now = 0.0
        self.count = 0
        self.event = False  # whether a request arrived before the last step
        pages = running * (4096 + 1024) // PAGE
        limits = Limits(tokens=8192, rows=running, pages=pages, page_size=PAGE)
        model = registry.make(perf, COEFFICIENTS, buckets=BUCKETS)
        self.observed: list[float] = []
        self._observe = model.observe
        model.observe = self.observe  # type: ignore[method-assign]
        self.scheduler = Scheduler(self.policy, model, limits, Role.MIXED, prefix_caching=False)

    def observe(self, load: Load, seconds: float) -> None:
        """Learn from a step, and record the CPU time."""
        began = time.process_time()
        self._observe(load, seconds)
        self.observed.append(time.process_time() - began)

    def slo(self) -> SLO:
        return SLO(ttft=float(self.random.uniform(0.5, 8)), tpot=float(self.random.uniform(0.02, 0.1)))

    def arrive(self) -> None:
        """Add one request: 32 to 4096 prompt tokens, an output of 0.5 to 1.5 times `answer`."""
        prompt = int(np.exp(self.random.uniform(np.log(32), np.log(4096))))
        output = int(self.random.integers(self.answer // 2, self.answer * 3 // 2)) + 1
        slo = self.slos[self.count % len(self.slos)] if self.slos else self.slo()
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        self.scheduler.add(Request(self.count, NewRequest(range(prompt), params, slo), self.now, seed=self.count))
        self.count += 1

    def step(self) -> float | None:
        """Run one step with its arrivals, and return the CPU seconds of `plan`, or None if nothing could run."""
        self.event = len(self.scheduler) < self.total
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
        started = self.now
        self.now += self.scheduler.predicted * float(self.random.lognormal(0.0, NOISE))
        tokens = tuple((7,) if span.samples else () for span in plan.spans)
        self.scheduler.settle(StepResult(plan.step, started, self.now, tokens))

    def recompute(self) -> float:
        """Return the CPU seconds of a decision whose tables are rebuilt."""
        began = time.process_time()
        queues = RequestQueues(Role.MIXED, PrefixHits(KVManager(BlockPool(1, PAGE, prefix_caching=False), 1)))
        for request in self.scheduler:
            queues.file(request)
        view = self.scheduler.view(self.now, self.now)
        self.policy.policy.decide(replace(view, prefill=queues.prefill, decode=queues.decode))
        return time.process_time() - began


def milliseconds(label: str, seconds: list[float]) -> dict[str, object]:
    values = np.array(seconds or [np.nan]) * 1e3
    return {f"median_{label}_ms": float(np.median(values)), f"p99_{label}_ms": float(np.percentile(values, 99))}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Disable the garbage collector, which the engine runs only in idle gaps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def measure(
    name: str, running: int, waiting: int, steps: int, answer: int = 0, classes: int = 0, perf: str = PERF
) -> dict[str, object]:
    """Return the milliseconds of CPU time over `steps` steps, after warm-up steps to reach the steady state."""
    steady = Steady(name, running, waiting, answer, classes, perf)
    for _ in range(max(steps, 2 * steady.answer)):
        steady.step()
    steady.policy.seconds.clear()
    steady.policy.granted.clear()
    steady.observed.clear()
    with undisturbed():
        timed = [
            (spent, steady.policy.seconds[-1], steady.event)
            for _ in range(steps)
            if (spent := steady.step()) is not None
        ]
        again = [steady.recompute() for _ in range(max(5, steps // 10))]
    plans = [spent for spent, _, _ in timed]
    quiet, events = ([one for one in timed if one[2] is kind] for kind in (False, True))
    decode = steady.policy.view.decode if steady.policy.view else ()
    found: dict[str, object] = {"policy": name, "running": running, "waiting": waiting, "steps": len(plans)}
    found["events"] = len(events)
    found["decoding_in_last_view"] = len(decode)
    found["granted"] = float(np.mean(steady.policy.granted))
    named = {"decide": steady.policy.seconds, "observe": steady.observed, "plan": plans, "recompute": again}
    for kind, some in (("quiet", quiet), ("event", events)):
        named |= {kind: [spent for spent, _, _ in some], f"decide_{kind}": [decided for _, decided, _ in some]}
    for label, seconds in named.items():
        found |= milliseconds(label, seconds)
    return found


class Full:
    """Instances with `residents` waiting prompts or running decodes each. Writer: the measuring function."""

    def __init__(self, roles: list[Role], residents: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.count = 0
        limits = Limits(tokens=8192, rows=2 * residents + 64, pages=residents * 1024, page_size=PAGE)
        self.instances = [
            Scheduler(policies.make("distserve"), GeneralModel(COEFFICIENTS), limits, role, prefix_caching=False)
            for role in roles
        ]
        for one in self.instances:
            for _ in range(residents):
                request = self.request()
                if one.role is Role.PREFILL:
                    one.add(request)
                else:
                    self.decodes(request, one)

    def request(self) -> Request:
        prompt = int(np.exp(self.random.uniform(np.log(32), np.log(4096))))
        slo = SLO(ttft=float(self.random.choice([0.5, 1, 2, 8])), tpot=float(self.random.choice([0.025, 0.05, 0.1])))
        self.count += 1
        arrival = float(self.random.uniform(0.0, 0.2))
        return Request(
            self.count, NewRequest(range(prompt), SamplingParams(max_tokens=1000), slo), arrival, seed=self.count
        )

    @staticmethod
    def decodes(request: Request, one: Scheduler) -> None:
        """Make an instance accept a request whose prompt another instance has computed."""
        request.computed = request.prompt_length
        request.output.append(7)
        request.first_token_at = 0.2
        request.token_times.append(0.2)
        request.pages = list(range(one.blocks.count(request.computed)))
        assert one.reserve(request) is not None
        one.accept(request)

    def view(self, index: int) -> View:
        return self.instances[index].view(0.2, 0.2)


def place(name: str, instances: int, residents: int, requests: int) -> dict[str, object]:
    """Return the CPU time to route a request: `prefill`, and `redirect` once it waits there."""
    half = [Role.PREFILL] * (instances // 2)
    full = Full([*half, *([Role.DECODE] * (instances - len(half)))], residents)
    views = [ReadOnlyView(one) for one in full.instances]  # what a cluster gives its router
    fleet, router = Fleet(0.2, views, lambda tokens: 1e-3 + 1e-7 * tokens), routing.make(name)
    router.redirect(fleet)
    spent = []
    with undisturbed():
        for _ in range(requests):
            request = full.request()
            began = time.process_time()
            index = router.prefill(request, fleet)[0]
            seconds = time.process_time() - began
            full.instances[index].add(request)
            began = time.process_time()
            router.redirect(fleet)
            spent.append(seconds + time.process_time() - began)
            full.instances[index].cancel(request.id, "abort")
    row = {"routing": name, "instances": instances, "residents": residents, "requests": requests}
    return row | milliseconds("request", spent)


def promise(new: int, running: int, times: int) -> dict[str, object]:
    """Return the CPU time of the DP for `new` requests beside `running` decodes of three tiers."""
    full = Full([Role.MIXED], running)
    for _ in range(new):
        full.instances[0].add(full.request())
    view = full.view(0)
    spent = []
    with undisturbed():
        for _ in range(times):
            began = time.process_time()
            terms = terms_of(view, idle_of(view, 0.0), draft=0, margin=0.05)
            none, come = (prompts_of(view, count, 256) for count in (0, new))
            kept = admitted(standing_of(view, none, 256), come, terms)
            spent.append(time.process_time() - began)
    row = {"program": "dp", "new": new, "running": running, "admitted": int(kept.sum())}
    return row | milliseconds("admit", spent)


def best(by: str, rounds: list[list[dict[str, object]]]) -> list[dict[str, object]]:
    """Return for each row the round with the minimum, since other load only adds time."""
    return [min(each, key=lambda row: cast(float, row[by])) for each in zip(*rounds, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=[*policies.names(), *VARIANTS])
    parser.add_argument("--sizes", nargs="+", default=["64+256", "512+4096"], metavar="RUNNING+WAITING")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--answer",
        type=int,
        default=0,
        metavar="N",
        help="mean output tokens per request [the number of running requests]",
    )
    parser.add_argument("--classes", type=int, default=0, metavar="N", help="pairs of objectives [one per request]")
    common.add_output(parser, "scheduler_cost")
    parser.add_argument("--perf", default=PERF, choices=KINDS, metavar="NAME", help=f"step-time model [{PERF}]")
    parser.add_argument("--routers", nargs="*", default=PLACED)
    parser.add_argument(
        "--fleet",
        default="64x256",
        metavar="INSTANCESxRESIDENTS",
        help="fleet for routing; half of the instances prefill",
    )
    parser.add_argument("--program", default="10+200", metavar="NEW+RUNNING")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="rounds; the minimum counts")
    args = parser.parse_args()
    sizes = [(int(size.split("+")[0]), int(size.split("+")[1])) for size in args.sizes]
    instances, residents = map(int, args.fleet.split("x"))
    new, running = map(int, args.program.split("+"))
    rounds = range(args.repeats)
    rows = best(
        "median_decide_ms",
        [
            [
                measure(n, *size, args.steps, args.answer, args.classes, args.perf)
                for size in sizes
                for n in args.policies
            ]
            for _ in rounds
        ],
    )
    placed = best(
        "median_request_ms", [[place(n, instances, residents, args.steps) for n in args.routers] for _ in rounds]
    )
    program = best("median_admit_ms", [[promise(new, running, args.steps)] for _ in rounds])
    titles = [
        "policy",
        "running",
        "waiting",
        "in a step",
        "decide",
        "p99",
        "plan incl. decide",
        "p99 ",
        "observe",
        "quiet",
        "event",
    ]
    titles += ["recompute", "p99  "]
    keys = ["policy", "running", "waiting", "granted"]
    keys += [f"{s}_{label}_ms" for label in ("decide", "plan") for s in ("median", "p99")]
    keys += ["median_observe_ms", "median_quiet_ms", "median_event_ms", "median_recompute_ms", "p99_recompute_ms"]
    print_table("CPU ms per step: median and 99th percentile", titles, [[row[key] for key in keys] for row in rows])
    for title, found in (("CPU ms per routed request", placed), ("CPU ms per decision on new requests", program)):
        if found:
            names = [key.removesuffix("_ms").replace("_", " ") for key in found[0]]
            print_table(title, names, [list(row.values()) for row in found])
    common.save(args, {"rows": rows, "routers": placed, "program": program})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
