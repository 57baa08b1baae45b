"""The answer to a capacity question: the cheapest set-up, what limits it, how far it reaches, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.capacity.search import Searcher, Step
from jaxserve.capacity.trial import Candidate, Outcome, Scale, Trial

RATES = (1.1, 1.25, 1.5, 2.0, 3.0)  # times the asked rate, for the headroom
SLOWER = (0.9, 0.75, 0.5, 0.25, 0.1)  # times the asked rate, if nothing keeps it
FARTHER = 4  # times the given devices up to which a search for more goes
LIMITS = {"prefill": Scale(prefill=0.8), "decode": Scale(decode=0.8), "KV": Scale(kv=1.25)}
LIMITS_SHARE = 1 / 2  # of the requests, for what limits
ENOUGH = 0.995  # attainment above which more devices bring nothing
NOTHING = 0.005  # gain in attainment below which a limit is none


@dataclass
class Answer:
    """Results in the order in which they are found. Rates in requests per second.

    steps: one per number of devices. best: the cheapest set-up that keeps the objectives on the given devices.
    sustained, missed: rates that `best` keeps and does not. limits: attainment that a fifth less time for prompts, a
    fifth less for everything else, or a quarter more KV would add at `limits_at` (the rate `missed`, if known).
    fewest, most: devices with step times as short or as long as their error allows; None: more than were tried.
    nearest: without `best`, a set-up with more devices that would do.
    """

    goal: float
    rate: float
    count: int
    error: float = 0.0
    steps: list[Step] = field(default_factory=list)
    best: Outcome | None = None
    sustained: float | None = None
    missed: float | None = None
    limits_at: float | None = None
    limits: dict[str, float] = field(default_factory=dict)
    fewest: int | None = None
    most: int | None = None
    nearest: Step | None = None
    interrupted: bool = False

    @property
    def closest(self) -> Step | None:
        """The number of devices that comes closest to the goal, if none reaches it."""
        return max(self.steps, key=lambda step: (step.best is not None, step.attained), default=None)

    @property
    def limit(self) -> str:
        """What limits the set-up, by the largest gain; "" if not known or none gains."""
        name = max(self.limits, key=lambda one: self.limits[one], default="")
        return name if name and self.limits[name] > NOTHING else ""

    @property
    def fewer(self) -> Step | None:
        """The largest number of devices below the best's that was tried."""
        if self.best is None:
            return None
        below = [step for step in self.steps if step.devices < self.best.candidate.devices]
        return below[-1] if below else None


def complete(
    found: Answer,
    searcher: Searcher,
    candidates_of: Callable[[int], Sequence[Candidate]],
    error_of: Callable[[int], float],
) -> None:
    """Search, and fill an answer in the order of its fields, so that what an interrupt leaves is of use.

    candidates_of: set-ups for a number of devices. error_of: error of the step times (see Latency), by T. Equal
    arguments give equal answers.
    """
    load = searcher.load
    for step in searcher.fewest(range(1, found.count + 1), candidates_of):
        found.steps.append(step)
        if step.keeps(load.goal):
            found.best = step.best
    if found.best is None:
        _without(searcher, found, candidates_of)
        return
    found.error = error_of(found.best.candidate.tp)
    _headroom(searcher, found, found.best.candidate, RATES)
    if found.missed is not None:
        _limits(searcher, found, found.best.candidate, found.missed)
    _range(searcher, found, found.best.candidate, candidates_of)


def _without(searcher: Searcher, found: Answer, candidates_of: Callable[[int], Sequence[Candidate]]) -> None:
    """Say what is short of a goal that no set-up reaches, and find the nearest that does with more devices."""
    closest = found.closest
    if closest is not None and closest.best is not None:
        one = closest.best.candidate
        _limits(searcher, found, one, found.rate)
        _headroom(searcher, found, one, SLOWER)
    like = _alike(candidates_of, None if closest is None or closest.best is None else closest.best.candidate)
    for step in searcher.fewest(range(found.count + 1, FARTHER * found.count + 1), like):
        if step.keeps(found.goal):
            found.nearest = step


def _headroom(searcher: Searcher, found: Answer, one: Candidate, factors: Sequence[float]) -> None:
    """Find the first rates that a set-up keeps and does not keep."""
    rising = factors[0] > 1
    if rising:
        found.sustained = found.rate
    else:
        found.missed = found.rate
    for factor in factors:
        rate = found.rate * factor
        (outcome,) = searcher.simulate([Trial(one, searcher.load.requests, rate)])
        kept = outcome.attained >= found.goal
        if kept:
            found.sustained = rate
        else:
            found.missed = rate
        if kept != rising:
            return


def _limits(searcher: Searcher, found: Answer, one: Candidate, rate: float) -> None:
    """Find what limits a set-up: what it gains if prompts, everything else or the KV pool were better."""
    requests = searcher.load.counts([LIMITS_SHARE])[0]
    trials = [Trial(one, requests, rate), *(Trial(one, requests, rate, scale) for scale in LIMITS.values())]
    plain, *better = searcher.simulate(trials)
    found.limits_at = rate
    found.limits = {name: each.attained - plain.attained for name, each in zip(LIMITS, better, strict=True)}


def _range(
    searcher: Searcher, found: Answer, best: Candidate, candidates_of: Callable[[int], Sequence[Candidate]]
) -> None:
    """Find the number of devices with shorter and with longer step times, and what more devices bring."""
    alike = _alike(candidates_of, best)
    fast, slow = (Scale(factor, factor) for factor in (1 / (1 + found.error), 1 + found.error))
    found.fewest = best.devices
    for step in searcher.fewest(range(1, best.devices), alike, fast):
        if step.keeps(found.goal):
            found.fewest = step.devices
    for step in searcher.fewest(range(best.devices, FARTHER * found.count + 1), alike, slow):
        if step.keeps(found.goal):
            found.most = step.devices
    if found.best is not None and found.best.attained > ENOUGH:
        return
    for devices in range(best.devices + 1, found.count + 1):
        if several := alike(devices):
            found.steps.append(searcher.step(devices, several))
            return


def _alike(
    candidates_of: Callable[[int], Sequence[Candidate]], best: Candidate | None
) -> Callable[[int], Sequence[Candidate]]:
    """Leave only candidates with the policy and the steps of the best, or without one, of the first."""

    def alike(devices: int) -> list[Candidate]:
        several = candidates_of(devices)
        like = best or next(iter(several), None)
        return [one for one in several if like and (one.policy, one.chunk) == (like.policy, like.chunk)]

    return alike
