"""Load: arrival times, prompts, output lengths and objectives of requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InvalidValue
from jaxserve.sched.api.request import BEST_EFFORT
from jaxserve.sched.api.slo import ANSWER, NO_SLO, THINKING
from jaxserve.sched.sim.traces import load_trace
from jaxserve.sched.sim.workload import Arrival, Mix, Workload, scale

Prompt = str | tuple[int, ...]
Message = tuple[str, str]  # (role, text)


@dataclass(frozen=True, slots=True)
class Objective:
    """Objectives in milliseconds, with the names of the request body; None is no objective."""

    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    name: str = ""  # of its class, for tables
    tbt_slo_ms: float | None = None
    service_tier: str | None = None
    stages: tuple[tuple[str, float], ...] = ()  # (stage, milliseconds per token)

    @property
    def limits(self) -> dict[str, float]:
        """The objectives that are set, in milliseconds: ttft, tpot, tbt, and those of stages by their names."""
        own = {"ttft": self.ttft_slo_ms, "tpot": self.tpot_slo_ms, "tbt": self.tbt_slo_ms, **dict(self.stages)}
        return {metric: value for metric, value in own.items() if value is not None}

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
    """A request to send `at` seconds after the start of the run.

    history: messages before the prompt. after: index of an earlier call in the list, whose answer this one
    waits for; it is sent `delay` seconds after that answer, and `at` is that of the first call of the session.
    grows: the prompt continues the conversation of that call, with the answer that the server gave.
    thinking_tokens: leading tokens of the output that are a model's thinking, as its workload says.
    """

    at: float
    prompt: Prompt
    prompt_tokens: int  # 0: unknown until the server has counted
    output_tokens: int
    slo: Objective = NONE
    history: tuple[Message, ...] = ()
    after: int | None = None
    delay: float = 0.0
    grows: bool = False
    thinking_tokens: int = 0

    @property
    def text(self) -> Prompt:
        """The whole prompt of a server of completions: the texts of the conversation, one below the other."""
        if not self.history:
            return self.prompt
        assert isinstance(self.prompt, str)
        return "\n".join([*(text for _, text in self.history), self.prompt])


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


def warn(sentence: str) -> None:
    """Print what was left out of a file."""
    print(sentence, file=sys.stderr, flush=True)


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
        tell=warn,
    )
    return calls_of(arrivals, vocabulary, seed)


def workload_calls(
    source: Workload | Mix,
    *,
    count: int,
    rate: float,
    vocabulary: Sequence[int],
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    seed: int = 0,
) -> list[Call]:
    """Draw `count` requests of a simulator's workload at `rate` per second; all at once if it is infinite.

    Rounds of a request (tool calls) are calls of their own, each after the one before; their prompts contain all
    earlier rounds, with drawn tokens in place of the server's answers. Raises InvalidValue.
    """
    if not rate > 0:
        raise InvalidValue(f"request_rate={rate!r} must be positive", "request_rate")
    drawn = scale(source.draw(count, 1.0 if isinf(rate) else rate, seed), prompt=prompt_scale, output=output_scale)
    calls = calls_of(drawn, vocabulary, seed)
    return [replace(call, at=0.0) for call in calls] if isinf(rate) else calls


def calls_of(arrivals: Sequence[Arrival], vocabulary: Sequence[int], seed: int) -> list[Call]:
    """Return a call for each arrival of the simulator, with tokens of `vocabulary`."""
    return [
        Call(
            item.time,
            _prompt(item, index, vocabulary, seed),
            item.prompt_tokens,
            item.output_tokens,
            _slo(item),
            after=item.after,
            delay=item.delay,
            thinking_tokens=item.thinking_tokens,
        )
        for index, item in enumerate(arrivals)
    ]


def _slo(arrival: Arrival) -> Objective:
    slo = arrival.slo
    ttft, tpot = (None if isinf(value) else value * 1e3 for value in (slo.ttft, slo.tpot))
    tier = BEST_EFFORT if arrival.tier == BEST_EFFORT else None
    stages = tuple((stage, value * 1e3) for stage, value in slo.stages)
    return Objective(ttft, tpot, arrival.class_, None if slo.tbt is None else slo.tbt * 1e3, tier, stages)


def _prompt(arrival: Arrival, index: int, vocabulary: Sequence[int], seed: int) -> tuple[int, ...]:
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
        slo_class = SloClass(float(share), Objective(ttft, tpot, name, tbt, tier, stages))
    except ValueError as error:
        raise InvalidValue(f"slo_class={text!r} must read NAME=SHARE,ttft:MS,tpot:MS ({error})", "slo_class") from error
    if tier == "":
        raise InvalidValue(f"slo_class={text!r}: tier must name a tier of the server", "slo_class")
    if not (name and slo_class.share > 0 and all(value > 0 for value in times.values())):
        raise InvalidValue(f"slo_class={text!r}: the name must not be empty, the numbers positive", "slo_class")
    return slo_class


def with_classes(calls: Sequence[Call], classes: Sequence[SloClass], seed: int) -> list[Call]:
    """Give each call the objectives of a class, drawn by share; calls of a session are of one class.

    A call that names a class gets those of that class; other calls with objectives of their own keep them.
    """
    if not classes:
        return list(calls)
    shares = np.array([item.share for item in classes])
    named = {item.slo.name: item.slo for item in classes if item.slo.name}
    drawn = np.random.default_rng([seed, 1]).choice(len(classes), size=len(calls), p=shares / shares.sum())
    assigned: list[Call] = []
    for call, index in zip(calls, drawn, strict=True):
        slo = named.get(call.slo.name, call.slo)
        if slo == NONE:
            slo = classes[int(index)].slo if call.after is None else assigned[call.after].slo
        assigned.append(replace(call, slo=slo))
    return assigned


def schedule(calls: Sequence[Call], times: Sequence[float] | NDArray[np.float64]) -> list[Call]:
    """Return the calls at the given times: one for each call that is not `after` another."""
    scheduled: list[Call] = []
    first = iter(times)
    for call in calls:
        at = float(next(first)) if call.after is None else scheduled[call.after].at
        scheduled.append(replace(call, at=at))
    return scheduled


def starts(calls: Sequence[Call]) -> int:
    """Return the number of calls that are sent at their own time; the others follow an answer."""
    return sum(call.after is None for call in calls)


def faster(calls: Sequence[Call], factor: float) -> list[Call]:
    """Return the calls at `factor` times the rate, in the same order and with the same burstiness."""
    if not factor > 0:
        raise InvalidValue(f"the rate factor {factor!r} must be positive", "time_scale")
    return [replace(call, at=call.at / factor) for call in calls]
