"""One request of a recorded run as JSON: what happened to it, in bars for a picture and in the words of `explain`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any, NamedTuple

from jaxserve.sched.api.request import Request
from jaxserve.sched.metrics import measure, stage_allowance
from jaxserve.sched.recorded.explain import explain
from jaxserve.sched.recorded.record import Recorder
from jaxserve.sched.recorded.timeline import decodes, prompt_lengths, transfers

CLOSE = 0.005  # of the life of a request: two steps so close are drawn as one bar
BARS = 400  # at most, of each kind


class Bar(NamedTuple):
    """A stretch of time. Seconds since the arrival of the request."""

    kind: str  # prefill, decode, other (the instance works without the request), transfer
    instance: str
    start: float
    end: float
    steps: int = 1
    tokens: int = 0  # of the prompt

    def joined(self, later: Bar, close: float) -> Bar | None:
        """Return one bar for this and a later one of its lane; None if they are more than `close` apart."""
        if later.start - self.end > close:
            return None
        return self._replace(end=later.end, steps=self.steps + later.steps, tokens=self.tokens + later.tokens)


def request_timeline(recorder: Recorder, id: int) -> dict[str, Any]:
    """Return a request as JSON values: `lines` of words, `bars`, times. Raises InvalidValue for an unknown id.

    Times in seconds since its arrival: `first_token`, `last_token`, and `ttft_slo`, `tpot_slo`; null where unknown.
    """
    lines = explain(recorder, id)
    request = recorder.requests[id]
    measured = measure(request, allowance=stage_allowance(request))
    times = request.token_times
    bars = [bar._asdict() for bar in _bars(recorder, request)]
    return {
        "id": str(id),
        "key": request.key,
        "class": request.class_,
        "tier": request.tier,
        "prompt_tokens": measured.prompt,
        "output_tokens": measured.output,
        "attained": measured.attained,
        "finish_reason": request.finish_reason,
        "first_token": times[0] - request.arrival if times else None,
        "last_token": times[-1] - request.arrival if times else None,
        "ttft_slo": request.slo.ttft if isfinite(request.slo.ttft) else None,
        "tpot_slo": request.slo.tpot if isfinite(request.slo.tpot) else None,
        "tpot": measured.tpot if isfinite(measured.tpot) else None,
        "lines": lines,
        "bars": bars,
    }


def _bars(recorder: Recorder, request: Request) -> list[Bar]:
    lengths, id, arrival = prompt_lengths(recorder), request.id, request.arrival
    ends = (stretch.end for stretch in recorder.stretches)
    end = request.token_times[-1] if request.token_times else max(ends, default=0.0)
    names = {placement.instance for placement in recorder.placed if placement.request == id}
    names.update(move.target for move in recorder.moves if move.request == id)
    bars = []
    for stretch in recorder.stretches:
        if stretch.instance not in names or stretch.end <= arrival or stretch.start >= end:
            continue
        span = next((span for span in stretch.plan.spans if span.request == id), None)
        start, until = stretch.start - arrival, stretch.end - arrival
        if span is None:
            bars.append(Bar("other", stretch.instance, max(0.0, start), until))
        elif decodes(span, lengths):
            bars.append(Bar("decode", stretch.instance, start, until))
        else:
            bars.append(Bar("prefill", stretch.instance, start, until, tokens=span.length))
    for move in transfers(recorder):
        if move.request == id:
            bars.append(Bar("transfer", move.target, move.start - arrival, move.end - arrival))
    return list(_joined(bars, CLOSE * (end - arrival)))


def _joined(bars: Iterable[Bar], close: float) -> Iterator[Bar]:
    """Join bars that follow each other, and leave out those beyond BARS of a kind and instance."""
    lanes: dict[tuple[str, str], list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: bar.start):
        lane = lanes.setdefault((bar.kind, bar.instance), [])
        joined = lane[-1].joined(bar, close) if lane and bar.kind in ("decode", "other") else None
        if joined is not None:
            lane[-1] = joined
        else:
            lane.append(bar)
    for lane in lanes.values():
        yield from lane[:BARS]
