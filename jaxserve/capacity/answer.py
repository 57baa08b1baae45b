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
        name = max(self.limits, key=lambda limit: self.limits[limit], default="")
        return name if name and self.limits[name] > NOTHING else ""

    @property
    def fewer(self) -> Step | None:
        """The largest number of devices below the best's that was tried."""
        if self.best is None:
            return None
        below = [step for step in self.steps if step.devices < self.best.candidate.devices]
        return below[-1] if below else None


def complete(
    answer: Answer,
    searcher: Searcher,
    candidates_of: Callable[[int], Sequence[Candidate]],
    error_of: Callable[[int], float],
) -> None:
    """Search, and fill an answer in the order of its fields, so that what an interrupt leaves is of use.

    candidates_of: set-ups for a number of devices. error_of: error of the step times (see Latency), by T. Equal
    arguments give equal answers.
    """
    load = searcher.load
    for step in searcher.fewest(range(1, answer.count + 1), candidates_of):
        answer.steps.append(step)
        if step.keeps(load.goal):
            answer.best = step.best
    if answer.best is None:
        _without(searcher, answer, candidates_of)
        return
    answer.error = error_of(answer.best.candidate.tp)
    _headroom(searcher, answer, answer.best.candidate, RATES)
    if answer.missed is not None:
        _limits(searcher, answer, answer.best.candidate, answer.missed)
    _range(searcher, answer, answer.best.candidate, candidates_of)


def _without(searcher: Searcher, answer: Answer, candidates_of: Callable[[int], Sequence[Candidate]]) -> None:
    """Say what is short of a goal that no set-up reaches, and find the nearest that does with more devices."""
    closest = answer.closest
    if closest is not None and closest.best is not None:
        candidate = closest.best.candidate
        _limits(searcher, answer, candidate, answer.rate)
        _headroom(searcher, answer, candidate, SLOWER)
    like = _alike(candidates_of, None if closest is None or closest.best is None else closest.best.candidate)
    for step in searcher.fewest(range(answer.count + 1, FARTHER * answer.count + 1), like):
        if step.keeps(answer.goal):
            answer.nearest = step


def _headroom(searcher: Searcher, answer: Answer, candidate: Candidate, factors: Sequence[float]) -> None:
    """Find the first rates that a set-up keeps and does not keep."""
    rising = factors[0] > 1
    if rising:
        answer.sustained = answer.rate
    else:
        answer.missed = answer.rate
    for factor in factors:
        rate = answer.rate * factor
        (outcome,) = searcher.simulate([Trial(candidate, searcher.load.requests, rate)])
        kept = outcome.attained >= answer.goal
        if kept:
            answer.sustained = rate
        else:
            answer.missed = rate
        if kept != rising:
            return


def _limits(searcher: Searcher, answer: Answer, candidate: Candidate, rate: float) -> None:
    """Find what limits a set-up: what it gains if prompts, everything else or the KV pool were better."""
    requests = searcher.load.counts([LIMITS_SHARE])[0]
    trials = [Trial(candidate, requests, rate), *(Trial(candidate, requests, rate, scale) for scale in LIMITS.values())]
    plain, *better = searcher.simulate(trials)
    answer.limits_at = rate
    answer.limits = {name: each.attained - plain.attained for name, each in zip(LIMITS, better, strict=True)}


def _range(
    searcher: Searcher, answer: Answer, best: Candidate, candidates_of: Callable[[int], Sequence[Candidate]]
) -> None:
    """Find the number of devices with shorter and with longer step times, and what more devices bring."""
    alike = _alike(candidates_of, best)
    fast, slow = (Scale(factor, factor) for factor in (1 / (1 + answer.error), 1 + answer.error))
    answer.fewest = best.devices
    for step in searcher.fewest(range(1, best.devices), alike, fast):
        if step.keeps(answer.goal):
            answer.fewest = step.devices
    for step in searcher.fewest(range(best.devices, FARTHER * answer.count + 1), alike, slow):
        if step.keeps(answer.goal):
            answer.most = step.devices
    if answer.best is not None and answer.best.attained > ENOUGH:
        return
    for devices in range(best.devices + 1, answer.count + 1):
        if several := alike(devices):
            answer.steps.append(searcher.step(devices, several))
            return


def _alike(
    candidates_of: Callable[[int], Sequence[Candidate]], best: Candidate | None
) -> Callable[[int], Sequence[Candidate]]:
    """Leave only candidates with the policy and the steps of the best, or without one, of the first."""

    def alike(devices: int) -> list[Candidate]:
        several = candidates_of(devices)
        like = best or next(iter(several), None)
        return [
            candidate
            for candidate in several
            if like and (candidate.policy, candidate.chunk) == (like.policy, like.chunk)
        ]

    return alike
