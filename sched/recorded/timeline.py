"""A run, simulated or served, as a trace in Chrome's format, for ui.perfetto.dev and chrome://tracing.

There is one process per instance. Its first track has a slice per step, named after what the step computed,
with its spans. Further tracks show KV transfers to the instance, from the end of the prompt (or from the
reservation of pages, if later) until arrival. Arrows lead from a request's last chunk over its transfer to its
first decode step. Counters show pages held, requests without pages, and requests elsewhere that wait for KV
pages here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..api.plan import Span, StepPlan
from .record import Recorder, Stretch

Event = dict[str, Any]

STEPS, LANES = 1, 2  # track of the steps, and first track of arriving KV


class Transfer(NamedTuple):
    """The KV transfer of one request to another instance. Times in seconds."""

    request: int
    source: str
    target: str
    reserved: float  # when pages were reserved at the target
    start: float
    end: float


def transfers(recorder: Recorder) -> list[Transfer]:
    """List the completed transfers, in order of arrival."""
    lengths = prompt_lengths(recorder)
    prompts: dict[int, list[float]] = {}  # completion times by request
    for stretch in recorder.stretches:
        for span in stretch.plan.spans:
            if span.samples and not stretch.stopped and not decodes(span, lengths):
                prompts.setdefault(span.request, []).append(stretch.end)
    moves = []
    for at, request, source, target, reserved in recorder.moves:
        start = max([reserved, *(end for end in prompts.get(request, ()) if end <= at)])
        moves.append(Transfer(request, source, target, reserved, start, at))
    return moves


def trace(recorder: Recorder) -> dict[str, Any]:
    """Return the trace as JSON values, `{"traceEvents": [...]}`, with times in microseconds."""
    pids = {name: number for number, name in enumerate(recorder.limits, 1)}
    events: list[Event] = []
    for name, pid in pids.items():
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": pid, "tid": STEPS, "name": "thread_name", "args": {"name": "steps"}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
    lengths = prompt_lengths(recorder)
    timed = [_slice(stretch, pids[stretch.instance], lengths) for stretch in recorder.stretches]
    moves = list(_lanes(transfers(recorder)))
    for move, lane in moves:
        timed.append(_transfer(move, pids[move.target], lane))
    for pid, lane in sorted({(pids[move.target], lane) for move, lane in moves}):
        events.append({"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": {"name": "arriving KV"}})
    timed += _flows(recorder, moves, pids, lengths)
    timed += _counters(recorder, pids)
    timed.sort(key=lambda event: event["ts"])  # stable: equal times stay in this order
    return {"displayTimeUnit": "ms", "traceEvents": events + timed}


def decodes(span: Span, lengths: Mapping[int, int]) -> bool:
    """Return whether a span decodes, as opposed to computing or recomputing a prompt."""
    return span.length == 1 + span.draft and span.start >= lengths[span.request]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def prompt_lengths(recorder: Recorder) -> dict[int, int]:
    """Return the prompt length of every request, in tokens."""
    return {id: request.prompt_length for id, request in recorder.requests.items()}


def mixed_steps(recorder: Recorder) -> list[float]:
    """Return the seconds of the steps in which a decode instance computed prompts beside running decodes."""
    lengths, decoders = prompt_lengths(recorder), {turn.instance for turn in recorder.roles if turn.role == "decode"}
    kinds = [(stretch, {decodes(span, lengths) for span in stretch.plan.spans}) for stretch in recorder.stretches]
    return [stretch.end - stretch.start for stretch, kind in kinds if stretch.instance in decoders and len(kind) == 2]


def _slice(stretch: Stretch, pid: int, lengths: Mapping[int, int]) -> Event:
    chunks = [span for span in stretch.plan.spans if not decodes(span, lengths)]
    rows = [span for span in stretch.plan.spans if decodes(span, lengths)]
    name = _name(chunks, rows) + (", stopped" if stretch.stopped else "")
    return {
        **_between(stretch.start, stretch.end, pid, STEPS),
        "name": name,
        "cat": "step",
        "args": {"step": stretch.plan.step, **_arguments(stretch.plan, chunks, rows)},
    }


def _between(start: float, end: float, pid: int, tid: int) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": _us(start), "dur": _us(end - start)}


def _name(chunks: Sequence[Span], rows: Sequence[Span]) -> str:
    words = []
    if chunks:
        words.append(f"prefill {sum(span.length for span in chunks)}")
    if rows:
        words.append(f"decode {len(rows)}")
    return " + ".join(words)


def _arguments(plan: StepPlan, chunks: Sequence[Span], rows: Sequence[Span]) -> Event:
    arguments: Event = {}
    if plan.resume is not None:
        arguments["resumes"] = plan.resume
    if chunks:
        arguments["chunks"] = [f"request {s.request}: {s.start} to {s.start + s.length}" for s in chunks]
    if rows:
        arguments["rows"] = " ".join(str(span.request) for span in rows)
        arguments["longest"] = max(span.start for span in rows)
        drafted = sum(span.draft for span in rows)
        if drafted:
            arguments["drafted"] = drafted
    return arguments


def _transfer(move: Transfer, pid: int, lane: int) -> Event:
    return {
        **_between(move.start, move.end, pid, lane),
        "name": f"KV of {move.request}",
        "cat": "transfer",
        "args": {"request": move.request, "from": move.source, "reserved at": move.reserved},
    }


def _lanes(moves: Sequence[Transfer]) -> Iterator[tuple[Transfer, int]]:
    """Yield each transfer with a track of its target on which no transfers overlap."""
    free: dict[str, list[float]] = {}
    for move in sorted(moves, key=lambda move: (move.start, move.end, move.request)):
        lanes = free.setdefault(move.target, [])
        lane = next((number for number, until in enumerate(lanes) if until <= move.start), len(lanes))
        lanes[lane : lane + 1] = [move.end]
        yield move, LANES + lane


def _flows(
    recorder: Recorder, moves: Sequence[tuple[Transfer, int]], pids: Mapping[str, int], lengths: Mapping[int, int]
) -> Iterator[Event]:
    """Yield arrows. Their ends are in the middle of slices, which makes the slice unambiguous."""
    moved: dict[int, list[tuple[Transfer, int]]] = {}
    for move, lane in moves:
        moved.setdefault(move.request, []).append((move, lane))
    done: dict[int, Stretch] = {}  # step that completed the prompt, until the first decode step
    number = 0
    for stretch in recorder.stretches:
        for span in stretch.plan.spans:
            if not decodes(span, lengths):
                if span.samples and not stretch.stopped:
                    done[span.request] = stretch
                continue
            source = done.pop(span.request, None)
            if source is None:
                continue
            number += 1
            common = {"id": number, "name": f"request {span.request}", "cat": "request"}
            at = {"pid": pids[source.instance], "tid": STEPS, "ts": _us((source.start + source.end) / 2)}
            yield {"ph": "s", **at, **common}
            for move, lane in moved.get(span.request, ()):
                if source.end <= move.start and move.end <= stretch.start:
                    at = {"pid": pids[move.target], "tid": lane, "ts": _us((move.start + move.end) / 2)}
                    yield {"ph": "t", **at, **common}
            at = {"pid": pids[stretch.instance], "tid": STEPS, "ts": _us((stretch.start + stretch.end) / 2)}
            yield {"ph": "f", "bp": "e", **at, **common}


def _counters(recorder: Recorder, pids: dict[str, int]) -> Iterator[Event]:
    last: dict[tuple[str, str], int] = {}
    for level in recorder.levels:
        for name, value in (
            ("KV pages", level.pages),
            ("waiting requests", level.waiting),
            ("requests elsewhere that wait for KV", level.kv_waiting),
        ):
            if last.get((level.instance, name)) != value:
                last[level.instance, name] = value
                common = {"ph": "C", "pid": pids[level.instance], "ts": _us(level.at)}
                yield {**common, "name": name, "args": {name: value}}
