"""The life of one request in words: what it waited for, how it spent its slack, and why it missed its SLO.

The request is one of a simulation or of a served run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import NamedTuple

from ..api.errors import InvalidValue
from ..api.plan import Span
from ..api.request import BEST_EFFORT, Request
from ..metrics import FINISHED, Measured, measure, stage_allowance
from .record import Recorder, Stretch
from .timeline import Transfer, decodes, prompt_lengths, transfers

NAMED = 3  # requests that a wait is attributed to by name
SHOWN = 24  # chunks of a prompt, and waits between them, that are listed


class Piece(NamedTuple):
    """The work of one request in one stretch."""

    stretch: Stretch
    span: Span


class Line(NamedTuple):
    """One line of a description, and the time that it belongs to."""

    at: float
    text: str


def explain(recorder: Recorder, id: int) -> list[str]:
    """Describe a request in lines of text, with times since its arrival. Raises InvalidValue for an unknown id."""
    request = recorder.requests.get(id)
    if request is None:
        known = f"0 to {max(recorder.requests)}" if recorder.requests else "none"
        raise InvalidValue(f"request {id} must be one of those that arrived: {known}", "explain")
    lengths = prompt_lengths(recorder)
    pieces = [
        Piece(stretch, span) for stretch in recorder.stretches for span in stretch.plan.spans if span.request == id
    ]
    prompt = [piece for piece in pieces if not decodes(piece.span, lengths)]
    rows = [piece for piece in pieces if decodes(piece.span, lengths)]
    moves = [move for move in transfers(recorder) if move.request == id]
    measured = measure(request, allowance=stage_allowance(request))
    chunks = _shortened(list(_computed(recorder, request, prompt)))
    lines = [*_placed(recorder, request), *_demoted(recorder, request), *chunks, *_moved(request, moves)]
    lines += [*_first(request), *_decoded(recorder, request, rows), *_ended(request, measured)]
    lines.sort(key=lambda line: line.at)  # stable: keeps the order above for lines of one moment
    told = [f"{line.at - request.arrival:9.3f} s  {line.text}" for line in lines]
    return [_head(request, measured), *told, *_verdict(recorder, request, measured, prompt, rows)]


def _head(request: Request, measured: Measured) -> str:
    slo = request.slo
    key = f" ({request.key})" if request.key else ""
    tier = ", best effort" if request.tier == BEST_EFFORT else ""
    return (
        f"Request {request.id}{key}{tier}: {measured.prompt:,} prompt tokens, {measured.output:,} tokens of output; "
        f"promised the first within {_time(slo.ttft)}, every further one in {_time(slo.tpot)} on average"
        + (f", none later than {_time(slo.tbt)} after the one before" if slo.tbt is not None else "")
    )


def _placed(recorder: Recorder, request: Request) -> Iterator[Line]:
    placed = False
    for at, instance, id, waiting, backlog in recorder.placed:
        if id == request.id:
            came = "sent on to" if placed else "arrived, and was given to"
            work = f"{waiting} waiting, {backlog:,} prompt tokens to compute" if backlog else "no prompt ahead"
            yield Line(at, f"{came} {instance} ({work})")
            placed = True
    if not placed:
        yield Line(request.arrival, "arrived, and no instance took it")


def _demoted(recorder: Recorder, request: Request) -> Iterator[Line]:
    demotion = recorder.demoted.get(request.id)
    if demotion is None:
        return
    if demotion.due is None:
        why = "admission control did not expect to keep its objectives beside those promised before"
    else:
        token = "first" if request.first_token_at is None or request.first_token_at > demotion.at else "next"
        needs = f"needs {_time(demotion.needs)} even if nothing else runs"
        if demotion.due <= 0:
            why = f"its {token} token was due {_time(-demotion.due)} ago, and {needs}"
        elif demotion.needs > demotion.due:
            why = f"its {token} token is due in {_time(demotion.due)}, but {needs}"
        else:
            due = f", due in {_time(demotion.due)}," if isfinite(demotion.due) else ""
            why = f"the policy did not expect its {token} token{due} on time beside other requests"
    yield Line(demotion.at, f"became best effort on {demotion.instance}: {why}")


def _computed(recorder: Recorder, request: Request, pieces: Sequence[Piece]) -> Iterator[Line]:
    """Describe the chunks of the prompt, and the waits between them."""
    free = request.arrival
    reached = request.cached
    if request.cached:
        yield Line(request.arrival, f"{request.cached:,} tokens of its prompt were in the prefix cache")
    stopped = False
    for stretch, span in pieces:
        if stretch.start - free > 1e-9:
            state = "stopped at a segment boundary, " if stopped else ""
            blame = _blame(recorder, request.id, stretch.instance, free, stretch.start)
            yield Line(free, f"{state}waited {_time(stretch.start - free)}: {blame}")
        if span.start < reached:
            yield Line(stretch.start, f"its KV had been dropped: tokens from {span.start:,} on are computed again")
        end = span.start + span.length
        shared = len(stretch.plan.spans) - 1
        company = f" beside {shared} other request{'s' * (shared > 1)}" if shared else ""
        done = f"part of tokens {span.start:,} to {end:,}" if stretch.stopped else f"tokens {span.start:,} to {end:,}"
        took = _time(stretch.end - stretch.start)
        yield Line(stretch.start, f"{stretch.instance} computed {done} in {took}{company}")
        free, stopped = stretch.end, stretch.stopped
        reached = span.start if stretch.stopped else end


def _shortened(lines: list[Line]) -> list[Line]:
    """Leave out the middle of many lines, since a prompt that is stopped again and again would fill pages."""
    left_out = len(lines) - SHOWN
    if left_out < 2:
        return lines
    middle = Line(lines[SHOWN // 2].at, f"… {left_out} more chunks and waits …")
    return [*lines[: SHOWN // 2], middle, *lines[len(lines) - SHOWN // 2 :]]


def _moved(request: Request, moves: Sequence[Transfer]) -> Iterator[Line]:
    for move in moves:
        room = move.start - request.first_token_at if request.first_token_at is not None else 0.0
        if room > 1e-9:
            yield Line(move.start - room, f"its KV waited {_time(room)} for room on {move.target}")
        yield Line(move.start, f"its KV went from {move.source} to {move.target} in {_time(move.end - move.start)}")


def _first(request: Request) -> Iterator[Line]:
    if request.token_times:
        at = request.token_times[0]
        yield Line(at, f"first token, {_due(request.arrival + request.slo.ttft - at)}")


def _decoded(recorder: Recorder, request: Request, rows: Sequence[Piece]) -> Iterator[Line]:
    """Describe the decode steps on each instance, and the steps that left the request out."""
    by_instance: dict[str, list[Piece]] = {}
    for piece in rows:
        by_instance.setdefault(piece.stretch.instance, []).append(piece)
    for instance, pieces in by_instance.items():
        begin, end = pieces[0].stretch.start, pieces[-1].stretch.end
        mine = {id(piece.stretch) for piece in pieces}
        others = [stretch for stretch in _between(recorder, instance, begin, end) if id(stretch) not in mine]
        inside = sum(piece.stretch.end - piece.stretch.start for piece in pieces)
        text = f"{instance} decoded it in {len(pieces)} steps of {_time(inside / len(pieces))} on average"
        drafted = sum(piece.span.draft for piece in pieces)
        text += f", {drafted} tokens drafted" if drafted else ""
        if others:
            left = sum(stretch.end - stretch.start for stretch in others)
            text += f"; {len(others)} steps ran without it for {_time(left)} in all"
        yield Line(begin, text)
    gaps = [(late - early, early) for early, late in zip(request.token_times, request.token_times[1:], strict=False)]
    if gaps and max(gaps)[0] > 2 * request.slo.tpot:
        gap, at = max(gaps)
        yield Line(at, f"longest wait for a token: {_time(gap)}")


def _ended(request: Request, measured: Measured) -> Iterator[Line]:
    drops = f"; its KV was dropped {request.drops} times because pages ran out" if request.drops else ""
    if not request.token_times:
        yield Line(request.arrival, f"no token came: {request.error or request.finish_reason or 'unfinished'}{drops}")
        return
    slack = _due((measured.output - 1) * request.slo.tpot - (request.token_times[-1] - request.token_times[0]))
    ended = "the run ended before it" if request.finish_reason is None else f"ended ({request.finish_reason})"
    text = f"{ended}, {measured.output} tokens out"
    if measured.output > 1 and not request.slo.stages:
        text += f"; TPOT {_time(measured.tpot)}, {slack} over all of them"
    yield Line(request.token_times[-1], text + drops)


def _verdict(
    recorder: Recorder, request: Request, measured: Measured, prompt: Sequence[Piece], rows: Sequence[Piece]
) -> Iterator[str]:
    if measured.attained:
        yield "Attained both objectives."
        return
    if request.finish_reason not in FINISHED:
        yield f"Missed: {request.error or request.finish_reason or 'it was not over when the run ended'}."
    if not measured.ttft_attained and request.token_times:
        first = request.token_times[0]
        before = [piece.stretch for piece in prompt if piece.stretch.end <= first]
        computing = sum(stretch.end - stretch.start for stretch in before)
        late = measured.ttft - request.slo.ttft
        if late > 0 and not before:
            yield f"Missed TTFT by {_time(late)}: the steps that computed it are no longer recorded."
        elif late > 0:
            yield (
                f"Missed TTFT by {_time(late)}: of {_time(measured.ttft)} it was computed for {_time(computing)} and "
                f"waited for {_time(measured.ttft - computing)}; in these {_time(measured.ttft)} "
                + _blame(recorder, request.id, before[-1].instance, request.arrival, first)
                + "."
            )
    if not measured.tpot_attained and measured.output > 1 and rows:
        inside = sum(piece.stretch.end - piece.stretch.start for piece in rows)
        total = request.token_times[-1] - request.token_times[0]
        worst = max(rows, key=lambda piece: piece.stretch.end - piece.stretch.start).stretch
        yield (
            f"Missed TPOT: {_time(measured.tpot)} a token, promised {_time(request.slo.tpot)}. Of {_time(total)} after "
            f"the first token {_time(inside)} were decode steps with it ({_time(inside / len(rows))} each; the "
            f"longest, {_time(worst.end - worst.start)}, had {len(worst.plan.spans)} requests and a context of "
            f"{max(span.start for span in worst.plan.spans):,}), {_time(max(0.0, total - inside))} it waited."
        )


def _between(recorder: Recorder, instance: str, begin: float, end: float) -> Iterator[Stretch]:
    """Yield the stretches of an instance in an interval."""
    for stretch in recorder.stretches:
        if stretch.instance == instance and stretch.end > begin and stretch.start < end:
            yield stretch


def _blame(recorder: Recorder, id: int, instance: str, begin: float, end: float) -> str:
    """Name the requests that an instance worked on in an interval. A step's time is split by tokens."""
    seconds: dict[int, float] = {}
    busy = 0.0
    for stretch in _between(recorder, instance, begin, end):
        overlap = min(stretch.end, end) - max(stretch.start, begin)
        tokens = sum(span.length for span in stretch.plan.spans)
        busy += overlap
        for span in stretch.plan.spans:
            if span.request != id:
                seconds[span.request] = seconds.get(span.request, 0.0) + overlap * span.length / tokens
    named = [other for other in seconds if other not in recorder.hidden]
    ranked = sorted(named, key=lambda other: (-seconds[other], other))[:NAMED]
    lengths = prompt_lengths(recorder)
    words = [f"{_time(seconds[other])} for request {other} (prompt {lengths[other]:,})" for other in ranked]
    if len(named) < len(seconds):
        hidden = sum(spent for other, spent in seconds.items() if other in recorder.hidden)
        words.append(f"{_time(hidden)} for requests of other clients")
    more = len(named) - len(ranked)
    words += [f"{more} more"] if more else []
    if not words:
        return f"{instance} was idle" if busy == 0 else f"{instance} worked for no other request"
    return f"{instance} worked " + ", ".join(words)


def _due(slack: float) -> str:
    return f"{_time(slack)} to spare" if slack >= 0 else f"{_time(-slack)} late"


def _time(seconds: float) -> str:
    """Format seconds for people."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
