"""Output of an answer to a capacity question: lines, JSON and a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.capacity.answer import FARTHER, RATES, Answer
from jaxserve.capacity.search import Step
from jaxserve.capacity.trial import AS_IT_IS, Candidate, Load, Outcome

WIDTH = 100  # characters of a line above the plot


class Rows:
    """Prints whole runs, the best so far of shorter ones, what was left out, and the answer once it is known.

    Writer of what it has printed.
    """

    def __init__(self, load: Load, count: int) -> None:
        """count: the devices that are given."""
        self._load = load
        self._count = count
        self._best: dict[object, float] = {}
        self._answered = False

    def __call__(self, result: Outcome | Step) -> None:
        if isinstance(result, Step):
            if result.bounded or result.shorter:
                print(_left_out(result), flush=True)
            best, given = result.best, result.devices <= self._count
            if best is not None and given and not self._answered and result.keeps(self._load.goal):
                self._answered = True
                kept = f"this keeps them: {_number(result.devices)}: {best.candidate}"
                print(f"{kept}; headroom, limit and range follow (Ctrl-C ends with what is known)", flush=True)
            return
        key = result.candidate.devices, result.trial.requests, result.trial.scale
        if result.trial.requests < self._load.requests and result.attained <= self._best.get(key, -1.0):
            return
        if not self._best:
            print(f"devices {self._load.unit:>8} attained  TTFT p90  TPOT p90  goodput  set-up")
        self._best[key] = max(result.attained, self._best.get(key, -1.0))
        print(row(result), flush=True)


def row(outcome: Outcome) -> str:
    candidate, scale = outcome.candidate, outcome.trial.scale
    times = "" if scale == AS_IT_IS else f" (step times × {scale.decode:.3g})"
    return (
        f"{candidate.devices:>7} {outcome.trial.requests:>8} {outcome.attained:>8.1%} {_time(outcome.ttft):>9} "
        f"{_time(outcome.tpot):>9} {outcome.goodput:>6.3g}/s  {candidate}{times}"
    )


def lines(answer: Answer, command: Sequence[str], price: float | None, unit: str) -> list[str]:
    """Return the answer in sentences. price: of a device for an hour. unit: what rates count (`Load.unit`)."""
    said = ["", *_pareto(answer), ""]
    if answer.best is None:
        return said + _without(answer, unit)
    best, candidate = answer.best, answer.best.candidate
    said.append(
        f"answer: {_number(candidate.devices)}: {candidate}: {best.attained:.1%} of the requests keep their objectives"
    )
    if best.by_class:
        said.append("by class: " + ", ".join(f"{name} {share:.1%}" for name, share in best.by_class.items()))
    if answer.error and answer.fewest is not None:
        most = f"more than {answer.count * FARTHER}" if answer.most is None else str(answer.most)
        low = str(answer.fewest)
        text = low if low == most else f"{low} to {most}"
        said.append(
            f"range: {text} device{'s' * (text != '1')}, "
            f"with step times {1 + answer.error:g} times as short and as long"
        )
    said += [*_limit(answer), *_headroom(answer, unit), *_fewer(answer)]
    if price is not None:
        said.append(
            f"cost: {candidate.devices * price:.4g} an hour, {million(best, price):.3g} for a million tokens of output"
        )
    return [*said, f"serve it: {' '.join(command)}"]


def million(outcome: Outcome, price: float) -> float:
    """Return what a million tokens of output cost at a price per device and hour."""
    return outcome.candidate.devices * price / 3600 / outcome.output * 1e6


def as_json(answer: Answer, command: Sequence[str], price: float | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer as JSON. Shares from 0 to 1, seconds, requests and tokens per second."""
    best = answer.best
    return {
        **given,
        "goal": answer.goal,
        "qps": answer.rate,
        "keeps": best is not None,
        "devices": best.candidate.devices if best else None,
        "best": _outcome(best) if best else None,
        "range": {"error": answer.error, "fewest": answer.fewest, "most": answer.most} if best else None,
        "limit": answer.limit or None,
        "limits": answer.limits,
        "sustained_qps": answer.sustained,
        "missed_qps": answer.missed,
        "nearest": _step(answer.nearest) if answer.nearest else None,
        "price_per_million_output_tokens": million(best, price) if best and price is not None else None,
        "serve": " ".join(command) if best else None,
        "interrupted": answer.interrupted,
        "steps": [_step(step) for step in answer.steps],
    }


def plot(path: Path, answer: Answer, title: str, asked: float) -> Path:
    """Draw attainment and goodput against devices. asked: requests per second, the mark of the goodput."""
    from jaxserve.report import plot

    steps = sorted((step for step in answer.steps if step.best is not None), key=lambda step: step.devices)
    x = [float(step.devices) for step in steps]
    shares = [100 * step.attained for step in steps]
    rates = [step.best.goodput for step in steps if step.best is not None]
    series = {"best set-up": plot.Series(x, shares)}, {"best set-up": plot.Series(x, rates)}
    panels = [
        plot.Panel("Attainment", "devices", "% of requests", series[0], (0.0, 103.0), 100 * answer.goal, ticks=x),
        plot.Panel("Goodput", "devices", "requests/s that keep", series[1], level=asked, ticks=x),
    ]
    return plot.lines(path, panels, title="\n".join(textwrap.fill(line, WIDTH) for line in title.splitlines()))


def _pareto(answer: Answer) -> list[str]:
    """Draw the best attainment on each number of devices as bars."""
    drawn = [f"{'devices':>7} attained"]
    for step in sorted(answer.steps, key=lambda step: step.devices):
        best = step.best
        mark = "at most" if best is None else f"{best.goodput:.3g}/s keep them: {best.candidate}"
        if best is not None and not step.whole:
            mark += f" (the first {best.trial.requests} requests)"
        bar = "█" * round(20 * step.attained)
        drawn.append(f"{step.devices:>7} {bar:<20} {step.attained:>6.1%}  {mark}")
    return drawn


def _left_out(step: Step) -> str:
    parts = []
    if step.bounded:
        parts.append(f"{step.bounded} cannot keep them by any policy")
    if step.shorter:
        parts.append(f"{step.shorter} were worse on shorter runs")
    return f"{step.devices:>7} of {step.tried} set-ups {' and '.join(parts)}"


def _without(answer: Answer, unit: str) -> list[str]:
    closest, said = answer.closest, list[str]()
    if closest is None and answer.interrupted:
        said.append("no answer: stopped before the first number of devices was through")
    elif closest is None:
        said.append(f"no answer: the model does not fit {_number(answer.count)}")
    elif closest.best is None:
        said.append(
            f"no answer: at most {closest.attained:.1%} of the requests can keep their objectives on "
            f"{_number(closest.devices)}, whatever the policy"
        )
    else:
        best = closest.best
        said.append(
            f"no answer: {_number(answer.count)} keep {best.attained:.1%} at best, not {answer.goal:.0%}: "
            f"{best.candidate}"
        )
        said += _limit(answer)
        kept = "no rate that was tried" if answer.sustained is None else f"{answer.sustained:.4g} {unit}/s"
        said.append(f"it keeps them at {kept}, of the asked {answer.rate:.4g}")
    if answer.nearest is not None and answer.nearest.best is not None:
        best = answer.nearest.best
        said.append(f"would do: {_number(answer.nearest.devices)}: {best.candidate}: {best.attained:.1%}")
    elif closest is not None:
        said.append(f"no more devices up to {answer.count * FARTHER} would do, of those that were tried")
    return said


def _limit(answer: Answer) -> list[str]:
    if not answer.limits or answer.limits_at is None:
        return []
    what = {"prefill": "prompts a fifth faster", "decode": "all else a fifth faster", "KV": "a quarter more KV"}
    gains = ", ".join(f"{what[name]} {gain:+.1%}" for name, gain in answer.limits.items())
    return [f"limited by: {answer.limit or 'none of these'} (at {answer.limits_at:.4g}/s: {gains})"]


def _headroom(answer: Answer, unit: str) -> list[str]:
    if answer.sustained is None:
        return []
    end = "and more" if answer.missed is None else f"but not {answer.missed:.4g}"
    if answer.missed is None and answer.sustained < answer.rate * RATES[-1]:
        end = "higher rates were not tried"  # interrupted
    return [f"headroom: it keeps them at {answer.sustained:.4g} {unit}/s, {end}"]


def _fewer(answer: Answer) -> list[str]:
    if answer.best is None or answer.fewer is None:
        return []
    step, devices = answer.fewer, answer.best.candidate.devices
    most = "at most " if step.best is None else ""
    return [f"with {devices - step.devices} fewer: {most}{step.attained:.1%} on {_number(step.devices)}"]


def _number(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _outcome(outcome: Outcome) -> dict[str, Any]:
    fields = ("attained", "by_class", "goodput")
    return {
        "set_up": candidate_json(outcome.candidate),
        "requests": outcome.trial.requests,
        **{name: getattr(outcome, name) for name in fields},
        "ttft_p90": outcome.ttft,
        "tpot_p90": outcome.tpot,
        "output_throughput": outcome.output,
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {
        "mesh": str(candidate.mesh),
        "devices": candidate.devices,
        "prefill": candidate.prefill,
        "policy": candidate.policy,
        "max_num_batched_tokens": candidate.chunk,
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "devices": step.devices,
        "best": _outcome(step.best) if step.best else None,
        "ceiling": step.ceiling,
        "tried": step.tried,
        "left_out_by_bound": step.bounded,
        "left_out_by_shorter_runs": step.shorter,
        "whole": step.whole,
    }
