"""Load: arrival times, prompts, output lengths and objectives of requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.slo import ANSWER, NO_SLO, THINKING
from jaxserve.sched.sim.traces import load_trace
from jaxserve.sched.sim.workload import Arrival

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Objective:
    """Objectives in milliseconds, with the names of the request body; None is no objective."""

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    name: str = ""  # of its class, for tables
    tbt_slo_ms: float | None = None
    service_tier: str | None = None
    stages: tuple[tuple[str, float], ...] = ()  # (stage, milliseconds per token)

    def body(self) -> dict[str, Any]:
        """Return the fields of the request body; None are omitted by the client."""
        return {
            "ttft_slo_ms": self.ttft_slo_ms,
            "tpot_slo_ms": self.tpot_slo_ms,
            "tbt_slo_ms": self.tbt_slo_ms,
            "service_tier": self.service_tier,
            "stage_slo": {stage: {"tpot_slo_ms": value} for stage, value in self.stages} or None,
        }


NONE = Objective()


@dataclass(frozen=True, slots=True)
class Call:
    """A request to send `at` seconds after the start of the run."""

    at: float
    prompt: Prompt
    prompt_tokens: int  # 0: unknown until the server has counted
    output_tokens: int
    slo: Objective = NONE


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Return arrival times in seconds, with gamma-distributed gaps of shape `burstiness` (1 is Poisson).

    As in vLLM, gaps are scaled so that the mean rate is exactly `rate`. With an infinite rate all
    requests arrive at once.
    """
    if not rate > 0:
        raise InvalidValue(f"request_rate={rate!r} must be positive", "request_rate")
    if not burstiness > 0:
        raise InvalidValue(f"burstiness={burstiness!r} must be positive", "burstiness")
    if isinf(rate) or count == 0:
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    times = np.cumsum(gaps)
    return times * (count / rate / times[-1]) if times[-1] > 0 else times


def lengths(count: int, mean: int, ratio: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw token counts uniformly from mean·(1 - ratio) to mean·(1 + ratio), at least 1."""
    if mean < 1:
        raise InvalidValue(f"a length of {mean} tokens must be at least 1", "random_input_len")
    if not 0 <= ratio < 1:
        raise InvalidValue(f"random_range_ratio={ratio!r} must be at least 0 and below 1", "random_range_ratio")
    low, high = max(1, round(mean * (1 - ratio))), max(1, round(mean * (1 + ratio)))
    return rng.integers(low, high + 1, count)


def words(count: int, vocabulary: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """Draw `count` token ids from `vocabulary`."""
    return tuple(int(vocabulary[i]) for i in rng.integers(0, len(vocabulary), count))


def random_calls(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    vocabulary: Sequence[int],
    seed: int = 0,
) -> list[Call]:
    """Return calls with prompts of random token ids; `at` is 0, see `schedule`."""
    rng = np.random.default_rng(seed)
    prompts, outputs = lengths(count, input_len, range_ratio, rng), lengths(count, output_len, range_ratio, rng)
    return [Call(0.0, words(int(n), vocabulary, rng), int(n), int(m)) for n, m in zip(prompts, outputs, strict=True)]


def custom_calls(path: Path, count: int, output_len: int) -> list[Call]:
    """Read one JSON object per line: `prompt`, optional `output_tokens`, `ttft_slo_ms`, `tpot_slo_ms`.

    Lines repeat if there are fewer than `count`. Raises InvalidValue naming the line.
    """
    known = {"prompt", "output_tokens", "ttft_slo_ms", "tpot_slo_ms"}
    made: list[Call] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidValue(f"{path}:{number}: not JSON: {error}", "dataset_path") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise InvalidValue(f"{path}:{number}: the line must be an object with a string `prompt`", "dataset_path")
        if unknown := set(row) - known:
            raise InvalidValue(f"{path}:{number}: unknown {sorted(unknown)}; allowed: {sorted(known)}", "dataset_path")
        slo = Objective(row.get("ttft_slo_ms"), row.get("tpot_slo_ms"))
        made.append(Call(0.0, row["prompt"], 0, int(row.get("output_tokens", output_len)), slo))
    if not made:
        raise InvalidValue(f"{path} has no requests", "dataset_path")
    return [made[i % len(made)] for i in range(count)]


def trace_calls(
    path: Path,
    *,
    count: int | None,
    vocabulary: Sequence[int],
    time_scale: float = 1.0,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    seed: int = 0,
) -> list[Call]:
    """Return the first `count` requests of a trace, with times, lengths, shared prefixes and objectives.

    Times are multiplied and lengths divided, as in `jaxserve simulate`. Raises InvalidValue.
    """
    arrivals = load_trace(
        path,
        slo=NO_SLO,
        num_prompts=count,
        time_scale=time_scale,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
    )
    return [
        Call(
            item.time, _trace_prompt(item, index, vocabulary, seed), item.prompt_tokens, item.output_tokens, _slo(item)
        )
        for index, item in enumerate(arrivals)
    ]


def _slo(arrival: Arrival) -> Objective:
    ttft, tpot = (None if isinf(value) else value * 1e3 for value in (arrival.slo.ttft, arrival.slo.tpot))
    return Objective(ttft, tpot, arrival.class_)


def _trace_prompt(arrival: Arrival, index: int, vocabulary: Sequence[int], seed: int) -> tuple[int, ...]:
    """Map the simulator's unbounded token names to the server's vocabulary.

    Equal names become equal tokens, so requests share the prefixes that they share in the trace.
    """
    names = np.array(arrival.prompt(index)[:], dtype=np.int64).view(np.uint64) + np.uint64(seed)
    names = (names ^ (names >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    names = (names ^ (names >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn: NDArray[np.int64] = np.asarray(vocabulary, np.int64)[(names ^ (names >> np.uint64(31))) % len(vocabulary)]
    return tuple(drawn.tolist())


@dataclass(frozen=True, slots=True)
class SloClass:
    """A share of the requests, and their objectives."""

    share: float
    slo: Objective


def parse_slo_class(text: str) -> SloClass:
    """Parse `chat=0.7,ttft:500,tpot:50`: 70 % of the requests with TTFT 500 ms and TPOT 50 ms.

    Also `tbt:MS`, `thinking:MS` and `answer:MS` (per token of a stage), and `tier:NAME`.
    """
    head, *limits = text.split(",")
    name, _, share = head.partition("=")
    times: dict[str, float] = {}
    tier: str | None = None
    try:
        for limit in limits:
            metric, _, value = limit.partition(":")
            if metric not in ("ttft", "tpot", "tbt", THINKING, ANSWER, "tier"):
                raise ValueError(f"{metric!r} must be ttft, tpot, tbt, {THINKING}, {ANSWER} or tier")
            if metric == "tier":
                tier = value
            else:
                times[metric] = float(value)
        ttft, tpot, tbt = map(times.get, ("ttft", "tpot", "tbt"))
        stages = tuple((stage, times[stage]) for stage in (THINKING, ANSWER) if stage in times)
        made = SloClass(float(share), Objective(ttft, tpot, name, tbt, tier, stages))
    except ValueError as error:
        raise InvalidValue(f"slo_class={text!r} must read NAME=SHARE,ttft:MS,tpot:MS ({error})", "slo_class") from error
    if tier == "":
        raise InvalidValue(f"slo_class={text!r}: tier must name a tier of the server", "slo_class")
    if not (name and made.share > 0 and all(value > 0 for value in times.values())):
        raise InvalidValue(f"slo_class={text!r}: the name must not be empty, the numbers positive", "slo_class")
    return made


def with_classes(calls: Sequence[Call], classes: Sequence[SloClass], seed: int) -> list[Call]:
    """Give each call the objectives of a class, drawn by share; calls with their own keep them."""
    if not classes:
        return list(calls)
    shares = np.array([item.share for item in classes])
    drawn = np.random.default_rng([seed, 1]).choice(len(classes), size=len(calls), p=shares / shares.sum())
    return [
        call if call.slo != NONE else replace(call, slo=classes[int(index)].slo)
        for call, index in zip(calls, drawn, strict=True)
    ]


def schedule(calls: Sequence[Call], times: Sequence[float] | NDArray[np.float64]) -> list[Call]:
    """Return the calls at the given times."""
    return [replace(call, at=float(at)) for call, at in zip(calls, times, strict=True)]


def faster(calls: Sequence[Call], factor: float) -> list[Call]:
    """Return the calls at `factor` times the rate, in the same order and with the same burstiness."""
    if not factor > 0:
        raise InvalidValue(f"the rate factor {factor!r} must be positive", "time_scale")
    return [replace(call, at=call.at / factor) for call in calls]
