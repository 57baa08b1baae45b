"""Digest the decisions of every policy under every router, over ten small workloads in virtual time.

Verifies changes that must not change behavior, such as renames and moves. Before the change:

    scripts/decisions --out before.txt

and after the change, on the same machine:

    scripts/decisions --compare before.txt

Each line is one combination: policy, router, workload, submitted steps, and the SHA-256 of the decisions. The digest
covers each submitted plan (virtual time, instance, spans with their pages and tokens), each request to stop a running
step, each KV transfer, and for each request the times of its tokens and of its end, the instances that computed it,
and whether it was demoted to best effort. Only numbers are hashed, no names of classes, modules, fields or journal
entries. An invalid combination has `refused` instead of a digest. The comparison prints one line for each difference,
and exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "scripts")]

# A rename in the project affects only these imports and the section "the adapter" below.
from common import origin  # noqa: E402
from decision_workloads import WORKLOADS, Job, Setting  # noqa: E402

from jaxserve.report.progress import bar  # noqa: E402
from jaxserve.sched import admission, policies, routing  # noqa: E402
from jaxserve.sched.api.errors import InvalidValue  # noqa: E402
from jaxserve.sched.api.new_request import STANDARD, NewRequest  # noqa: E402
from jaxserve.sched.api.params import SamplingParams  # noqa: E402
from jaxserve.sched.api.policy import Limits, Role  # noqa: E402
from jaxserve.sched.api.preemption import stopping  # noqa: E402
from jaxserve.sched.api.request import BEST_EFFORT, Request  # noqa: E402
from jaxserve.sched.api.slo import SLO, THINKING  # noqa: E402
from jaxserve.sched.api.thinking import ThinkingEnd  # noqa: E402
from jaxserve.sched.cluster.cluster import Cluster, Instance  # noqa: E402
from jaxserve.sched.instance.scheduler import Scheduler  # noqa: E402
from jaxserve.sched.perf.model import Coefficients, GeneralModel  # noqa: E402
from jaxserve.sched.sim import clock  # noqa: E402
from jaxserve.sched.sim.executor import END_THINKING, EOS, Device, SimExecutor  # noqa: E402

POLICIES = sorted(policies.names())
ROUTERS = sorted(routing.ROUTERS)
# Options with code paths of their own, under names that do not change when an option is renamed.
VARIANTS = {
    "kairos-literal": "kairos:literal",
    "sjf-and-kairos": "prefill=sjf,decode=kairos",
    "flowprefill-whole": "flowprefill:no-preempt",
    "deflect-dropped": "deflect:dropped",
    "write-back": "least_work:write_back",
}
EXTRA = (  # (policy, router)
    ("kairos-literal", "least_work"),
    ("sjf-and-kairos", "least_work"),
    ("flowprefill-whole", "least_work"),
    ("distserve", "deflect-dropped"),
    ("kairos", "deflect-dropped"),
    ("distserve", "write-back"),
    ("unified", "write-back"),
)
ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
TRUTH = Coefficients(fixed=4e-3, prefill=6e-5, decode=1e-4, quadratic=1e-8, longest=2e-6, context=1e-7)
BELIEVED = Coefficients(fixed=5e-3, prefill=5e-5, decode=8e-5, quadratic=1e-8, longest=2e-6, context=1e-7)
HORIZON = 1e4  # virtual seconds after which a run counts as stuck


# ---- the adapter: drives the project and reads its decisions ---------------------------------------------------------


class Digest:
    """A running hash of tuples of numbers."""

    def __init__(self) -> None:
        self.steps = 0
        self._hash = hashlib.sha256()

    def add(self, *numbers: Any) -> None:
        self._hash.update(f"{numbers!r}\n".encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


PLAN, STOP, EXPORT, IMPORT, REQUEST = range(5)  # kinds of hashed events


class Recorded(SimExecutor):
    """A simulated executor that hashes its calls."""

    def record(self, instance: int, digest: Digest, computed: dict[int, set[int]]) -> None:
        self._instance, self._digest, self._computed = instance, digest, computed

    def submit(self, plan: Any) -> Any:
        self._digest.steps += 1
        resumed = -1 if plan.resume is None else plan.resume
        spans = tuple(map(numbers, plan.spans))
        self._digest.add(PLAN, self.now(), self._instance, plan.step, int(plan.preemptible), resumed, spans)
        for span in plan.spans:
            self._computed.setdefault(span.request, set()).add(self._instance)
        return super().submit(plan)

    def preempt(self, step: Any) -> None:
        self._digest.add(STOP, self.now(), self._instance)
        super().preempt(step)

    def export_kv(self, pages: Sequence[int]) -> Any:
        self._digest.add(EXPORT, self.now(), self._instance, tuple(pages))
        return super().export_kv(pages)

    async def import_kv(self, kv_buffer: Any, pages: Sequence[int]) -> None:
        self._digest.add(IMPORT, self.now(), self._instance, tuple(pages))
        await super().import_kv(kv_buffer, pages)


def numbers(span: Any) -> tuple[Any, ...]:
    """Return a span as numbers."""
    begin = span.begin
    first = () if begin is None else (begin.seed, begin.prompt_length, tuple(begin.output), tuple(begin.eos))
    work = span.request, span.slot, span.start, span.length, span.draft, int(span.samples)
    return (*work, tuple(span.new_pages), tuple(span.tokens), first)


class Run:
    """One simulation: a policy and a router on the cluster of a setting."""

    def __init__(self, policy: str, router: str, setting: Setting) -> None:
        self._policy, self._router, self._setting = policy, router, setting
        self.digest = Digest()
        self._computed: dict[int, set[int]] = {}  # request -> instances that computed part of it
        self._tokens: dict[int, list[tuple[float, int]]] = {}  # request -> (time, number of tokens) of its outputs
        self._ended: dict[int, float] = {}
        self._requests: dict[int, Request] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
        self._followers: dict[int, list[int]] = {}
        for id, job in enumerate(setting.jobs):
            if job.follows is not None:
                self._followers.setdefault(job.follows, []).append(id)

    async def run(self) -> None:
        """Serve all requests. Raises InvalidValue if the configuration is invalid."""
        self._loop = clock.loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        instances = [self._instance(index, ROLES[role]) for index, role in enumerate(self._setting.roles)]
        admits = admission.make(self._setting.admission)
        self._cluster = Cluster(instances, routing.make(self._router, admits), admits)
        machine = asyncio.create_task(self._cluster.run())
        await asyncio.sleep(0)
        for at, roles in self._setting.role_changes:
            self._loop.at(at, 1, self._change, {index: ROLES[role] for index, role in roles.items()})
        for id, job in enumerate(self._setting.jobs):
            if job.follows is None:
                self._loop.at(job.arrival, 0, self._submit, id)
        await asyncio.wait([machine, self._over], timeout=HORIZON, return_when=asyncio.FIRST_COMPLETED)
        if machine.done():
            machine.result()
        if not self._over.done():
            raise RuntimeError(f"{self._policy} {self._router}: requests that did not end: {self._unfinished()}")
        await asyncio.sleep(1.0)  # let surplus steps and transfers end
        self._cluster.check()
        machine.cancel()
        await asyncio.wait([machine])
        for id, request in sorted(self._requests.items()):
            came, demoted = tuple(self._tokens[id]), request.tier != self._tier(self._setting.jobs[id])
            where = tuple(sorted(self._computed.get(id, ())))
            self.digest.add(REQUEST, id, sum(count for _, count in came), came, self._ended[id], where, int(demoted))

    def _unfinished(self) -> list[int]:
        return [id for id in range(len(self._setting.jobs)) if id not in self._ended]

    @staticmethod
    def _tier(job: Job) -> str:
        return BEST_EFFORT if job.best_effort else STANDARD

    def _instance(self, index: int, role: Role) -> Instance:
        setting, policy = self._setting, self._policy
        if setting.draft and not policy.startswith("slos_serve"):  # slos_serve drafts by itself
            policy = f"{policy}/draft"
        segments = 8
        limits = Limits(
            setting.tokens,
            setting.rows,
            setting.pages,
            setting.page_size,
            setting.prompts,
            preemptible=setting.preemptible,
            stopping=stopping(segments),
            draft=setting.draft,
        )
        scheduler = Scheduler(policies.make(policy), GeneralModel(BELIEVED), limits, role, prefix_caching=True)
        device = Device(
            setting.pages,
            setting.page_size,
            kv_bytes_per_token=100_000,
            segments=segments,
            noise=0.03,
            acceptance=0.6 if setting.draft else 0.0,
            behind=setting.behind,
        )
        jobs = setting.jobs
        executor = Recorded(
            GeneralModel(TRUTH, correct=False),
            device,
            {id: job.output for id, job in enumerate(jobs)},
            self._loop,
            thoughts={id: job.thinking for id, job in enumerate(jobs) if job.thinking},
            seed=(7, index),
            fails=self._fails if setting.failing else None,
        )
        executor.record(index, self.digest, self._computed)
        executor.lead = setting.lead
        return Instance(f"{index}", scheduler, executor)

    def _fails(self, plan: Any) -> bool:
        return self.digest.steps < 200 and self.digest.steps % self._setting.failing == 0

    def _change(self, roles: Mapping[int, Role]) -> None:
        try:
            self._cluster.set_roles(roles)
        except InvalidValue:  # after the router's own role changes, no instance of some role would be left
            self.digest.add(-1, self._loop.now)

    def _submit(self, id: int) -> None:
        job, self._tokens[id] = self._setting.jobs[id], []
        before = () if job.follows is None else self._prompts[job.follows]
        own = range(10_000 * (id + 1), 10_000 * (id + 1) + job.prompt)
        shared = range(1000 * (job.family + 1), 1000 * (job.family + 1) + job.prefix) if not before else ()
        self._prompts[id] = prompt = (*before, *shared, *own)
        slo = SLO(job.ttft, job.tpot, job.tbt, ((THINKING, 2 * job.tpot),) if job.thinking else ())
        request = Request(
            id,
            NewRequest(prompt, SamplingParams(max_tokens=None), slo, priority=job.priority, tier=self._tier(job)),
            self._loop.now,
            seed=id,
            eos=frozenset([EOS]),
            thinking=ThinkingEnd(((END_THINKING,),)) if job.thinking else None,
        )
        self._requests[id] = request
        self._cluster.submit(
            request, lambda delta: self._output(id, len(delta.tokens), delta.finish_reason is not None)
        )
        if job.cancel_at is not None:
            self._loop.at(job.cancel_at, 1, self._cluster.cancel, id)

    def _output(self, id: int, tokens: int, ended: bool) -> None:
        now = self._loop.now
        self._tokens[id].append((now, tokens))
        if not ended or id in self._ended:
            return
        self._ended[id] = now
        for follower in self._followers.get(id, ()):
            self._loop.at(now + self._setting.jobs[follower].arrival, 0, self._submit, follower)
        if not self._unfinished():
            self._over.set_result(None)


# ---- the table ------------------------------------------------------------------------------------------------------

Key = tuple[str, str, str]  # policy, router, workload


class Decided(NamedTuple):
    """The result of one combination; `digest` is `refused` if it is invalid."""

    steps: int
    digest: str


def decide(policy: str, router: str, workload: str) -> Decided:
    """Simulate one combination."""
    run = Run(VARIANTS.get(policy, policy), VARIANTS.get(router, router), WORKLOADS[workload]())
    try:
        clock.run(run.run())
    except InvalidValue:
        return Decided(0, "refused")
    return Decided(run.digest.steps, run.digest.hexdigest())


def combinations(words: Sequence[str]) -> Iterator[Key]:
    """Yield the combinations in which each of `words` is the policy, router or workload; all without words."""
    pairs = [(policy, router) for policy in POLICIES for router in ROUTERS]
    for policy, router in [*pairs, *EXTRA]:
        for workload in WORKLOADS:
            if set(words) <= {policy, router, workload}:
                yield policy, router, workload


def decide_all(keys: Sequence[Key]) -> dict[Key, Decided]:
    found = {}
    with bar("decisions") as progress:
        for index, key in enumerate(keys):
            progress(index, len(keys), " ".join(key))
            found[key] = decide(*key)
    return found


def text(found: Mapping[Key, Decided]) -> str:
    """Return the lines of the table."""
    rows = [(*key, str(one.steps), one.digest) for key, one in found.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def read(path: Path) -> dict[Key, Decided]:
    """Read a table written by `--out`. Raises ValueError for an invalid line."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        cells = line.split()
        if len(cells) != 5 or not cells[3].isdigit():
            raise ValueError(f"{path}:{number}: {line!r} must be: policy router workload steps digest")
        found[cells[0], cells[1], cells[2]] = Decided(int(cells[3]), cells[4])
    return found


def differences(before: Mapping[Key, Decided], after: Mapping[Key, Decided]) -> Iterator[str]:
    """Yield one line for each combination whose decisions differ."""
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was == now:
            continue
        name = " ".join(key)
        if was is None or now is None:
            yield f"{name}: only {'after' if was is None else 'before'}"
        else:
            yield f"{name}: {was.steps} steps {was.digest[:12]} before, {now.steps} steps {now.digest[:12]} after"


def header(keys: Sequence[Key], seconds: float) -> str:
    about = ", ".join(f"{name} {value}" for name, value in origin().items())
    return (
        f"# scripts/decisions --out FILE: {len(keys)} combinations in {seconds:.0f} s\n# {about}\n"
        "# policy, router, workload, steps, SHA-256 of the decisions\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run scripts/decisions."""
    parser = argparse.ArgumentParser(
        prog="scripts/decisions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only combinations with this policy, router or workload"
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file instead of stdout")
    goal.add_argument("--compare", type=Path, metavar="FILE", help="compare with the table in this file")
    args = parser.parse_args(argv)
    keys = list(combinations(args.words))
    if not keys:
        known = ", ".join([*POLICIES, *ROUTERS, *WORKLOADS])
        parser.error(f"no combination has {' and '.join(map(repr, args.words))}; choose from {known}")
    before = read(args.compare) if args.compare else {}
    begun = time.monotonic()
    found = decide_all(keys)
    seconds = time.monotonic() - begun
    if args.out:
        args.out.write_text(header(keys, seconds) + text(found), encoding="utf-8")
        print(f"{len(keys)} combinations in {seconds:.0f} s, written to {args.out}")
    elif args.compare:
        asked = {key: one for key, one in before.items() if set(args.words) <= set(key)}
        wrong = list(differences(asked, found))
        print("\n".join([*wrong, f"{len(keys)} combinations, {len(wrong)} differ, in {seconds:.0f} s"]))
        return 1 if wrong else 0
    else:
        print(text(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
