"""The search for the fewest devices that keep the objectives.

Numbers of devices are tried from the smallest on. On each, candidates are left out in this order:

* by memory (fit.py): an engine would not start;
* by `Runner.bound`: not even a policy that knows the future attains the goal. Both are safe: neither leaves out a
  candidate that would keep the objectives in the simulation;
* by successive halving: all others serve the first eighth of the requests, some of these the first third, and some
  of these all; with equal attainment, the lower TTFT is better. Of those within a margin of the best, the best of
  each mesh and split goes on first, then the best of another policy on each: where a short run cannot tell, for
  instance since nothing is late yet, it leaves no mesh out. It may still leave out the best candidate, so what it
  left out is counted. A number of devices is given up if its best candidate is below the goal by more than the
  margin: a queue that grows in the first requests is longer after more of them.

Equal arguments give equal results: trials have a fixed seed, and their order does not depend on when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.capacity.trial import AS_IT_IS, Candidate, Load, Outcome, Scale, Trial, loosest
from jaxserve.sched.policies import HALVES, WHOLE

if TYPE_CHECKING:
    from jaxserve.capacity.fit import Fit

POLICIES = ("unified", "distserve", "sarathi")  # the default, and the usual ones of split and of mixed instances
CHUNKS = (8192, 2048)  # tokens of a step


class Rung(NamedTuple):
    """A run of successive halving.

    share: of the requests. most, least: how many candidates go on. margin: attainment below the best, or below the
    goal, with which one goes on only to make up the least.
    """

    share: float
    most: int
    least: int
    margin: float


RUNGS = (Rung(1 / 8, 8, 4, 0.15), Rung(1 / 3, 4, 2, 0.05), Rung(1.0, 1, 1, 0.0))

Simulate = Callable[[Sequence[Trial]], Iterable[Outcome]]  # in the order of the trials
Bound = Callable[[Trial], float]


def candidates(
    devices: int, fits: Mapping[int, Fit], policies: Sequence[str], chunks: Sequence[int]
) -> Iterator[Candidate]:
    """Yield every set-up that uses all `devices`, of the T that `fits` has. The order decides ties.

    A policy for mixed instances is tried colocated only, one with halves split only (alone on a single instance),
    `unified` in both ways.
    """
    for tp in sorted(fits):
        if devices % tp or not fits[tp].fits:
            continue
        instances = devices // tp
        splits = [None, *range(1, instances)]
        for prefill in splits:
            for policy in policies:
                if _suits(policy.partition(":")[0], instances, prefill):
                    for chunk in chunks:
                        yield Candidate(instances, tp, prefill, policy, chunk)


def _suits(policy: str, instances: int, prefill: int | None) -> bool:
    if policy in WHOLE and policy != "unified":
        return prefill is None
    if policy in HALVES or "=" in policy:
        return prefill is not None or instances == 1
    return True


class Step(NamedTuple):
    """What was found on one number of devices.

    best: the best outcome of the longest run; None if every candidate was left out by the bound, which then is
    `ceiling`. tried: candidates that fit in memory. bounded: those left out by the bound. shorter: those that halving
    left out.
    """

    devices: int
    best: Outcome | None
    ceiling: float
    tried: int
    bounded: int
    shorter: int
    whole: bool  # whether `best` served all requests

    def keeps(self, goal: float) -> bool:
        return self.best is not None and self.whole and self.best.attained >= goal

    @property
    def attained(self) -> float:
        return self.ceiling if self.best is None else self.best.attained


Tell = Callable[[Outcome | Step], None]


@dataclass(frozen=True)
class Searcher:
    """How a search simulates, bounds and reports."""

    load: Load
    simulate: Simulate
    bound: Bound
    tell: Tell

    def step(self, devices: int, several: Sequence[Candidate], scale: Scale = AS_IT_IS) -> Step:
        """Find the best of several candidates with equally many devices."""
        load, goal = self.load, self.load.goal
        chunk = max((candidate.chunk for candidate in several), default=1)
        like = [loosest(candidate, chunk) for candidate in several]
        known = {alike: self.bound(Trial(alike, load.requests, load.rate, scale)) for alike in dict.fromkeys(like)}
        bounds = [known[alike] for alike in like]
        able = [candidate for candidate, share in zip(several, bounds, strict=True) if share >= goal]
        bounded = len(several) - len(able)
        if not able:
            return self._told(Step(devices, None, max(bounds, default=0.0), len(several), bounded, 0, whole=False))
        counts = [min(load.requests, max(1, count)) for count in load.counts([rung.share for rung in RUNGS])]
        ranked: list[Outcome] = []
        going = able
        for count, rung in zip(counts, RUNGS[-len(counts) :], strict=True):
            trials = [Trial(candidate, count, load.rate, scale) for candidate in going]
            ranked = self._ranked(trials)
            if count < load.requests and ranked[0].attained < goal - rung.margin:
                break
            going = promoted(ranked, rung)
        whole = ranked[0].trial.requests >= load.requests
        return self._told(Step(devices, ranked[0], 1.0, len(several), bounded, len(able) - len(ranked), whole))

    def fewest(
        self, counts: Iterable[int], candidates_of: Callable[[int], Sequence[Candidate]], scale: Scale = AS_IT_IS
    ) -> Iterator[Step]:
        """Yield a step for each number of devices that has candidates, and end with the first that keeps the goal."""
        for devices in counts:
            several = candidates_of(devices)
            if several:
                step = self.step(devices, several, scale)
                yield step
                if step.keeps(self.load.goal):
                    return

    def _told(self, step: Step) -> Step:
        self.tell(step)
        return step

    def _ranked(self, trials: Sequence[Trial]) -> list[Outcome]:
        outcomes = []
        for outcome in self.simulate(trials):
            self.tell(outcome)
            outcomes.append(outcome)
        # stable: then in the order of candidates
        return sorted(outcomes, key=lambda result: (-result.attained, result.ttft))


def promoted(ranked: Sequence[Outcome], rung: Rung) -> list[Candidate]:
    """Return the candidates that go on, of outcomes from the best down.

    First the best of each mesh and split, then the best of another policy on each, and so on.
    """
    near = [outcome.candidate for outcome in ranked if outcome.attained >= ranked[0].attained - rung.margin]
    policies: dict[object, dict[str, Candidate]] = {}
    for candidate in near:
        policies.setdefault((candidate.instances, candidate.tp, candidate.prefill), {}).setdefault(
            candidate.policy, candidate
        )
    turns = zip_longest(*(each.values() for each in policies.values()))
    going = [chosen for turn in turns for chosen in turn if chosen is not None][: rung.most]
    others = (outcome.candidate for outcome in ranked if outcome.candidate not in going)
    return going + list(islice(others, max(0, rung.least - len(going))))
