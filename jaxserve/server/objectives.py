"""The latency objectives of a request, from its body, its headers, its tier or the server's defaults; and their end."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

from jaxserve.config import ServeConfig
from jaxserve.errors import ECHO, InvalidValue, short
from jaxserve.outputs import RequestMetrics
from jaxserve.sched.api.new_request import STANDARD
from jaxserve.sched.api.slo import LONGEST, SHORTEST, SLO
from jaxserve.sched.metrics import measure
from jaxserve.server.failures import wrong
from jaxserve.server.openai import Timed
from jaxserve.settings.tiers import PLAIN, stages_over

# In order of precedence. Gateways send the first name, load generators the second.
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")

# The name of an InferenceObjective of the Gateway API inference extension, and of llm-d before.
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")

# Objectives under other names, as in `x-ttft-slo`. Ignoring them would promise nothing.
_NEAR = re.compile(r"(?<![a-z])(ttft|tpot|tbt|itl|slos?)(?![a-z])|time[-_]?to[-_]?first|time[-_]?per[-_]?output", re.I)

MAX_PRIORITY = 2**31 - 1  # must fit an integer column of the scheduler


class Objectives(NamedTuple):
    """The SLO, priority and tier of a request."""

    slo: SLO
    priority: int
    tier: str
    pace: bool = False  # send tokens no earlier than the objectives require
    own: bool = False  # the request asks for them, itself or by a tier: they are not the server's defaults


def objectives_of(
    body: Timed, headers: Mapping[str, str], config: ServeConfig, tiers: Collection[str] | None = None
) -> Objectives:
    """Return the objectives of a request.

    Body fields take precedence over headers, headers over the tier, the tier over the server's
    defaults. `tiers`: those that the client may choose; None: all. Raises InvalidValue that names the field or header.
    """
    _check_headers(headers)
    tier, slo, name = config.tier(body.service_tier or _gateway_tier(headers, config, tiers) or STANDARD)
    ttft = _first(("ttft_slo_ms", body.ttft_slo_ms), TTFT_HEADERS, headers)
    tpot = _first(("tpot_slo_ms", body.tpot_slo_ms), TPOT_HEADERS, headers)
    tbt = _first(("tbt_slo_ms", body.tbt_slo_ms), (), headers)
    stages = tuple(
        (stage, _seconds(f"stage_slo.{stage[:ECHO]}.tpot_slo_ms", given.tpot_slo_ms))
        for stage, given in (body.stage_slo or {}).items()
    )
    if stages or not (ttft is tpot is tbt is None):
        try:
            slo = replace(
                slo,
                ttft=slo.ttft if ttft is None else ttft,
                tpot=slo.tpot if tpot is None else tpot,
                tbt=slo.tbt if tbt is None else tbt,
                stages=stages_over(slo.stages, tpot, stages),
            )
        except InvalidValue as error:
            raise InvalidValue(str(error), "stage_slo") from error
    priority = tier.priority if body.priority is None else body.priority
    if abs(priority) > MAX_PRIORITY:
        raise wrong("priority", priority, f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    pace = config.pace_tokens if body.pace_tokens is None else body.pace_tokens
    own = name not in PLAIN or bool(stages) or not (ttft is tpot is tbt is None)
    return Objectives(slo, priority, name, pace, own)


class Ended(NamedTuple):
    """An output that has ended, as `measure` reads it. Times are seconds on the engine's clock."""

    id: int
    arrival: float
    prompt_length: int
    slo: SLO
    token_times: Sequence[float]
    finish_reason: str | None


def outcome(outputs: Sequence[tuple[Ended, RequestMetrics]]) -> dict[str, Any] | None:
    """Return what was promised, predicted and kept of an answer, in ms: the worst of its outputs.

    Without what is not known or has no objective. None if there is no objective, or no output has ended.
    """
    measures = [measure(output, allowance=times.allowance) for output, times in outputs]
    if not (measures and measures[0].promised):
        return None
    slo = outputs[0][0].slo
    seconds: dict[str, list[float | None]] = {
        "ttft_slo_ms": [slo.ttft],
        "predicted_ttft_ms": [times.predicted for _, times in outputs],
        "ttft_ms": [output.ttft for output in measures],
        "tpot_slo_ms": [slo.tpot],
        "tpot_ms": [output.tpot for output in measures],
        "tbt_slo_ms": [slo.tbt],
        "gap_ms": [output.largest_gap for output in measures],
    }
    known = {
        name: [value for value in values if value is not None and isfinite(value)] for name, values in seconds.items()
    }
    worst: dict[str, Any] = {name: round(1e3 * max(values), 3) for name, values in known.items() if values}
    return {**worst, "attained": all(output.attained for output in measures)}


def _check_headers(headers: Mapping[str, str]) -> None:
    """Raise InvalidValue for a header that looks like an objective, but is none."""
    for name in headers:
        if _NEAR.search(name) and name.lower() not in (*TTFT_HEADERS, *TPOT_HEADERS):
            known = f"{TTFT_HEADERS[-1]} and {TPOT_HEADERS[-1]}, or the fields ttft_slo_ms, tpot_slo_ms and tbt_slo_ms"
            raise InvalidValue(f"{name[:ECHO]} is no header of a request: objectives in ms are {known}", name[:ECHO])


def _gateway_tier(headers: Mapping[str, str], config: ServeConfig, tiers: Collection[str] | None) -> str | None:
    """Return the tier that a gateway names as the request's objective; other objectives are the gateway's own."""
    named = next((headers[name] for name in OBJECTIVE_HEADERS if name in headers), None)
    return named if named in config.tiers and (tiers is None or named in tiers) else None


def _first(field: tuple[str, float | None], names: tuple[str, ...], headers: Mapping[str, str]) -> float | None:
    """Return seconds from a body field in ms, else from the first header present, else None."""
    field_name, given = field
    if given is not None:
        return _seconds(field_name, given)
    for name in names:
        if name in headers:
            try:
                return _seconds(name, float(headers[name]))
            except ValueError as error:
                raise InvalidValue(f"{name}: {short(headers[name])} must be a positive number of ms", name) from error
    return None


def _seconds(name: str, milliseconds: float) -> float:
    seconds = milliseconds / 1000.0
    if not SHORTEST <= seconds <= LONGEST:
        allowed = f"a positive number of milliseconds, from {SHORTEST * 1e3:g} to {LONGEST * 1e3:g}"
        raise InvalidValue(f"{name}={milliseconds} must be {allowed}; omit it for the server's default", name)
    return seconds
