"""Snapshots of a server as JSON: what `GET /v1/live` sends, for the dashboard, `jaxserve top` and other viewers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.engine.runtime.activity import RunningStep
from jaxserve.engine.runtime.flight_recorder import EndedRequest, Event
from jaxserve.engine.runtime.info import EngineInfo, InstanceStats, Stats
from jaxserve.report.snapshot_form import Outcome, number, present_class, present_ttft
from jaxserve.version import __version__


class Reading(NamedTuple):
    """What a snapshot is made from. Numbers of replicas come with what is theirs; those of one engine are -1."""

    at: float  # Unix time
    elapsed: float  # seconds since the reading before; 0: there is none
    stats: Stats
    before: Stats | None
    events: Sequence[tuple[int, Event]]  # since then
    ended: Sequence[tuple[int, EndedRequest]]  # since then
    lately: Sequence[EndedRequest]  # of the last LATELY seconds


def public_id(replica: int, request: int) -> str:
    """Return the name of a request in URLs: its number, after that of its replica if there are several."""
    return str(request) if replica < 0 else f"{replica}-{request}"


def snapshot(reading: Reading, info: EngineInfo, model: str, client: str | None = None) -> dict[str, Any]:
    """Return a snapshot as JSON values. Times in seconds, null where unknown or infinite.

    `time` is a Unix time. `server`: version, model, policy, routing. `instances`: of each its name, role, running,
    waiting, kv_usage (0 to 1), pages, pages_held, backlog_tokens, slack, prefill_queue, predicted_ttft (of a prompt of
    1,024 tokens) and `step`: null, or prefill_tokens, decodes, predicted and left (until its predicted end). `classes`:
    by class of requests, waiting and running now, and of those that ended in the last 60 s: ended, attainment (0 to 1,
    null without objectives), ttft_slack and tpot_slack (medians; negative: late). `rates`: prompt_tokens,
    generated_tokens, requests, per second since the snapshot before. `ttft`: predicted and measured, means of the last
    60 s, and requests. `events`: since the snapshot before, each with time, kind (stop, demotion, deflection, move,
    reroute, preemption, role, hang, failure), instance, request, text, count. `counts`: totals since the start.
    `requests`: that have ended since the snapshot before, as in `GET /v1/requests`.

    client: events and requests of other clients are left out, or lose what names the request; None: none are.
    """
    return {
        "object": "snapshot",
        "time": round(reading.at, 3),
        "server": {"version": __version__, "model": model, "policy": info.policy, "routing": info.routing},
        "instances": [_instance(instance) for instance in reading.stats.instances],
        "classes": _classes(reading),
        "rates": _rates(reading),
        "ttft": present_ttft((request.predicted, request.ttft) for request in reading.lately),
        "events": [_event(reading.at, replica, event, client) for replica, event in reading.events],
        "counts": _counts(reading.stats),
        "requests": [
            present_request(reading.at, replica, request)
            for replica, request in reading.ended
            if client is None or request.client == client
        ],
    }


def _instance(instance: InstanceStats) -> dict[str, Any]:
    room = instance.headroom
    return {
        "name": instance.name,
        "role": instance.role,
        "running": instance.running,
        "waiting": instance.waiting,
        "kv_usage": round(instance.usage, 4),
        "pages": instance.pages,
        "pages_held": instance.pages_held,
        "backlog_tokens": instance.backlog_tokens,
        "slack": number(room.slack),
        "prefill_queue": number(room.queue),
        "predicted_ttft": number(room.ttft),
        "step": _step(instance.activity.step),
    }


def _step(step: RunningStep | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "prefill_tokens": step.prefill,
        "decodes": step.decodes,
        "predicted": number(step.seconds),
        "left": number(step.left),
    }


def _classes(reading: Reading) -> dict[str, Any]:
    waiting, running = Counter[str](), Counter[str]()
    for instance in reading.stats.instances:
        waiting.update(instance.activity.waiting)
        running.update(instance.activity.running)
    ended: dict[str, list[EndedRequest]] = {}
    for request in reading.lately:
        if request.reason != "abort":
            ended.setdefault(request.class_, []).append(request)
    names = sorted({*waiting, *running, *ended, *reading.stats.classes})
    return {
        name: {"waiting": waiting[name], "running": running[name], **_attainment(ended.get(name, []))} for name in names
    }


def _attainment(ended: Sequence[EndedRequest]) -> dict[str, Any]:
    outcomes = (
        Outcome(request.attained, request.slo_ttft - request.ttft, request.slo_tpot - request.tpot)
        for request in ended
        if request.promised
    )
    return present_class(len(ended), outcomes)


def _rates(reading: Reading) -> dict[str, float | None]:
    if reading.before is None or reading.elapsed <= 0:
        return {"prompt_tokens": None, "generated_tokens": None, "requests": None}
    now, before = reading.stats, reading.before
    gained = {
        "prompt_tokens": now.counters.prompt_tokens - before.counters.prompt_tokens,
        "generated_tokens": now.counters.generated_tokens - before.counters.generated_tokens,
        "requests": sum(now.finished.values()) - sum(before.finished.values()),
    }
    return {name: round(max(0, count) / reading.elapsed, 2) for name, count in gained.items()}


def _counts(stats: Stats) -> dict[str, int]:
    counters = stats.counters
    return {
        "requests": sum(stats.finished.values()),
        "stops": counters.suspended,
        "deflections": stats.deflections,
        "demotions": counters.demotions,
        "moves": stats.transfers,
        "preemptions": counters.preemptions,
    }


def _event(at: float, replica: int, event: Event, client: str | None) -> dict[str, Any]:
    named = event.request is not None and (client is None or event.client == client)
    return {
        "time": round(at - event.ago, 3),
        "kind": event.kind,
        "instance": event.instance if replica < 0 else f"{replica}/{event.instance}",
        "request": public_id(replica, event.request) if named and event.request is not None else None,
        "text": event.text,
        "count": event.amount,
    }


def present_request(at: float, replica: int, request: EndedRequest) -> dict[str, Any]:
    """Return an ended request as JSON values. at: the Unix time to which its `ago` refers."""
    return {
        "id": public_id(replica, request.id),
        "key": request.key,
        "class": request.class_,
        "tier": request.tier,
        "ended": round(at - request.ago, 3),
        "prompt_tokens": request.prompt,
        "output_tokens": request.output,
        "waited": number(request.waited),
        "ttft": number(request.ttft),
        "tpot": number(request.tpot),
        "ttft_slo": number(request.slo_ttft),
        "tpot_slo": number(request.slo_tpot),
        "predicted_ttft": number(request.predicted),
        "attained": request.attained,
        "finish_reason": request.reason,
    }
