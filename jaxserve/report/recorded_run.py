"""A recorded run, simulated or served, as the snapshots that the dashboard shows. Times in seconds since its start."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from jaxserve.report.snapshot_form import LATELY, Outcome, number, present_class, present_ttft
from jaxserve.sched.api.request import Request
from jaxserve.sched.journal import REHEARSAL
from jaxserve.sched.metrics import Measured, measure, stage_allowance
from jaxserve.sched.recorded.record import Level, Recorder, Stretch
from jaxserve.sched.recorded.timeline import decodes, prompt_lengths
from jaxserve.version import __version__

SNAPSHOTS = 240
COUNTED = ("stop", "deflection", "demotion", "move", "reroute")  # events
UNNAMED = "all"  # class of requests that have none
NONE: Mapping[int, str] = {}


def present_run(recorder: Recorder, title: str, classes: Mapping[int, str] = NONE) -> dict[str, Any]:
    """Return `snapshots`, in the form of `GET /v1/live`, at even distances from the first arrival to the last token.

    classes: of requests that do not say it themselves.
    """
    run = _Run(recorder, title, classes)
    times = [run.begin + (run.end - run.begin) * number / (SNAPSHOTS - 1) for number in range(SNAPSHOTS)]
    return {"snapshots": [run.snapshot(before, at) for before, at in zip([-inf, *times], times, strict=False)]}


def present_ended(recorder: Recorder, classes: Mapping[int, str] = NONE) -> list[dict[str, Any]]:
    """Return all requests in the form of `GET /v1/requests`, newest first."""
    run = _Run(recorder, "", classes)
    return [run.request(request) for request in reversed(run.ended)]


class _Run:
    """What snapshots are made from, sorted by time."""

    def __init__(self, recorder: Recorder, title: str, classes: Mapping[int, str]) -> None:
        self._title, self._recorder = title, recorder
        self._requests = requests = [request for request in recorder.requests.values() if request.key != REHEARSAL]
        self._class = {request.id: classes.get(request.id) or request.class_ or UNNAMED for request in requests}
        ends = [stretch.end for stretch in recorder.stretches]
        self.begin = min((request.arrival for request in requests), default=0.0)
        self.end = max([*ends, *(request.arrival for request in requests)], default=self.begin)
        self._measured = {
            request.id: measure(request, request.class_, stage_allowance(request)) for request in requests
        }
        self.ended = sorted((request for request in requests if request.finish_reason is not None), key=_end_of)
        self._ends = [_end_of(request) for request in self.ended]
        self._levels = _by_instance(recorder.levels)
        self._stretches = _by_instance(recorder.stretches)
        self._lengths = prompt_lengths(recorder)
        events = sorted((event for event in self._all_events() if event[0] >= self.begin), key=lambda event: event[0])
        self._event_times, self._events = [at for at, _ in events], [event for _, event in events]
        self._tokens = sorted(at for request in requests for at in request.token_times)
        self._prompts = sorted(
            (stretch.end, self._prefilled(stretch)) for stretch in recorder.stretches if not stretch.stopped
        )
        self._prompt_ends = [at for at, _ in self._prompts]

    def _prefilled(self, stretch: Stretch) -> int:
        """Return the prompt tokens of a step."""
        return sum(span.length for span in stretch.plan.spans if not decodes(span, self._lengths))

    def snapshot(self, before: float, at: float) -> dict[str, Any]:
        """Return the snapshot at a time, with what happened since `before`."""
        since, until = bisect_right(self._ends, before), bisect_right(self._ends, at)
        begun, upto = bisect_right(self._event_times, before), bisect_right(self._event_times, at)
        kinds = Counter(event["kind"] for event in self._events[:upto])
        return {
            "object": "snapshot",
            "time": round(at - self.begin, 6),
            "server": {"version": __version__, "model": self._title, "policy": "", "routing": ""},
            "instances": [self._instance(name, at) for name in self._recorder.limits],
            "classes": self._classes(at),
            "rates": self._rates(before, at, until - since),
            "ttft": self._ttft(at),
            "events": self._events[begun:upto],
            "counts": {"requests": until, **{f"{kind}s": kinds[kind] for kind in COUNTED}},
            "requests": [self.request(request) for request in self.ended[since:until]],
        }

    def _role(self, name: str, at: float) -> str:
        roles = [change.role for change in self._recorder.roles if change.instance == name and change.at <= at]
        return roles[-1] if roles else ""

    def _instance(self, name: str, at: float) -> dict[str, Any]:
        levels, pages = self._levels.get(name, []), self._recorder.limits[name].pages
        place = bisect_right(levels, at, key=lambda level: level.at)
        level = levels[place - 1] if place else Level(at, name, 0, 0, 0, 0)
        stretches = self._stretches.get(name, [])
        place = bisect_right(stretches, at, key=lambda stretch: stretch.start)
        running = stretches[place - 1] if place and stretches[place - 1].end > at else None
        return {
            "name": name,
            "role": self._role(name, at),
            "running": level.running,
            "waiting": level.waiting,
            "kv_usage": round(level.pages / pages, 4),
            "pages": pages,
            "pages_held": level.pages,
            "backlog_tokens": level.backlog,
            "slack": number(level.slack),
            "prefill_queue": None,
            "predicted_ttft": None,
            "step": None if running is None else self._step(running, at),
        }

    def _step(self, stretch: Stretch, at: float) -> dict[str, Any]:
        prefill, spans = self._prefilled(stretch), stretch.plan.spans
        return {
            "prefill_tokens": prefill,
            "decodes": sum(decodes(span, self._lengths) for span in spans),
            "predicted": number(stretch.end - stretch.start),
            "left": number(stretch.end - at),
        }

    def _classes(self, at: float) -> dict[str, Any]:
        waiting, running = Counter[str](), Counter[str]()
        for request in self._requests:
            if request.arrival <= at and (request.finish_reason is None or _end_of(request) > at):
                begun = request.scheduled_at is not None and request.scheduled_at <= at
                (running if begun else waiting)[self._class[request.id]] += 1
        lately: dict[str, list[Request]] = {}
        for request in self.ended[bisect_right(self._ends, at - LATELY) : bisect_right(self._ends, at)]:
            lately.setdefault(self._class[request.id], []).append(request)
        names = sorted(set(self._class.values()))
        return {
            name: {
                "waiting": waiting[name],
                "running": running[name],
                **_attainment([(request, self._measured[request.id]) for request in lately.get(name, [])]),
            }
            for name in names
        }

    def _rates(self, before: float, at: float, requests: int) -> dict[str, float | None]:
        if before == -inf or at <= before:
            return {"prompt_tokens": None, "generated_tokens": None, "requests": None}
        prompts = self._prompts[bisect_right(self._prompt_ends, before) : bisect_right(self._prompt_ends, at)]
        generated = bisect_right(self._tokens, at) - bisect_right(self._tokens, before)
        counts = {
            "prompt_tokens": sum(tokens for _, tokens in prompts),
            "generated_tokens": generated,
            "requests": requests,
        }
        return {name: round(count / (at - before), 2) for name, count in counts.items()}

    def _ttft(self, at: float) -> dict[str, Any]:
        lately = self.ended[bisect_right(self._ends, at - LATELY) : bisect_right(self._ends, at)]
        return present_ttft(
            (self._recorder.predicted.get(request.id, inf), self._measured[request.id].ttft) for request in lately
        )

    def _all_events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        recorder = self._recorder
        for stretch in recorder.stretches:
            if stretch.stopped:
                yield self._event(stretch.end, "stop", stretch.instance)
        last: dict[int, str] = {}
        for placement in recorder.placed:
            if self._role(placement.instance, placement.at) == "decode":
                yield self._event(placement.at, "deflection", placement.instance, placement.request)
            elif placement.request in last:
                yield self._event(
                    placement.at, "reroute", placement.instance, placement.request, last[placement.request]
                )
            last[placement.request] = placement.instance
        for demoted in recorder.demoted.values():
            yield self._event(demoted.at, "demotion", demoted.instance, demoted.request)
        for move in recorder.moves:
            yield self._event(move.at, "move", move.target, move.request, move.source)
        for turn in recorder.roles:
            if turn.at > -inf:
                yield self._event(turn.at, "role", turn.instance, text=turn.role)

    def _event(
        self, at: float, kind: str, instance: str, request: int | None = None, text: str = ""
    ) -> tuple[float, dict[str, Any]]:
        id, time = None if request is None else str(request), round(at - self.begin, 6)
        return at, {"time": time, "kind": kind, "instance": instance, "request": id, "text": text, "count": 1}

    def request(self, request: Request) -> dict[str, Any]:
        """Return an ended request."""
        measured = self._measured[request.id]
        return {
            "id": str(request.id),
            "key": request.key,
            "class": self._class[request.id],
            "tier": request.tier,
            "ended": round(_end_of(request) - self.begin, 6),
            "prompt_tokens": measured.prompt,
            "output_tokens": measured.output,
            "waited": number(inf if request.scheduled_at is None else request.scheduled_at - request.arrival),
            "ttft": number(measured.ttft),
            "tpot": number(measured.tpot),
            "ttft_slo": number(request.slo.ttft),
            "tpot_slo": number(request.slo.tpot),
            "predicted_ttft": number(self._recorder.predicted.get(request.id, inf)),
            "attained": measured.attained,
            "finish_reason": request.finish_reason,
        }


def _end_of(request: Request) -> float:
    return request.token_times[-1] if request.token_times else request.arrival


def _by_instance(several: Iterable[Any]) -> Mapping[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for item in several:
        groups.setdefault(item.instance, []).append(item)
    return groups


def _attainment(ended: Sequence[tuple[Request, Measured]]) -> dict[str, Any]:
    outcomes = (
        Outcome(measured.attained, request.slo.ttft - measured.ttft, request.slo.tpot - measured.tpot)
        for request, measured in ended
        if measured.promised
    )
    return present_class(len(ended), outcomes)
