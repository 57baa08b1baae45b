"""Every registered policy, router and admission is served on a real engine.

Each case serves the same requests over HTTP on `2x1`, on executors that are compiled once. The
tokens equal those of a 1x1 engine with policy `vllm` and one request at a time; no page and no
request is lost; `/metrics` agrees with the requests sent. A new registered name is served without a
change here. The bare run takes a sample; `-m full` serves the whole matrix.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.sched import admission, policies, routing
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.examples import cases
from tests.support.server.live import MODEL, Live
from tests.support.timing import until

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """The settings of a server."""

    policy: str
    routing: str
    admission: str
    mode: str


def halves() -> list[str]:
    """Return policies composed of halves without a combined name."""
    prefill, decode = (set(names) for names in zip(*policies.HALVES.values(), strict=True))
    return [
        *(f"prefill={name},decode=continuous" for name in policies.PREFILL if name not in prefill),
        *(f"prefill=fcfs,decode={name}" for name in policies.DECODE if name not in decode),
    ]


def refusing() -> Iterator[str]:
    """Return admissions that can refuse."""
    for name in sorted(admission.ADMISSIONS):
        try:
            admission.make(f"{name}:refuse")
        except InvalidValue:
            continue
        yield f"{name}:refuse"


COLUMNS = (
    [*policies.names(), *halves()],
    sorted(routing.ROUTERS),
    [*sorted(admission.ADMISSIONS), *refusing()],
    ["disaggregated", "colocated"],
)
MATRIX = [Case(*names) for names in itertools.product(*COLUMNS)]


def sample() -> list[Case]:
    """Return few cases that have every policy, and every router and admission in both modes.

    tests/sched/test_laws.py has every pair of router and admission.
    """
    policies, routers, admissions, modes = COLUMNS
    longest = max(len(routers), len(admissions), -(-len(policies) // 2))
    return [
        Case(*(names[number % len(names)] for names in (policies, routers, admissions)), modes[number // longest])
        for number in range(2 * longest)
    ]


def bodies() -> list[dict[str, Any]]:
    """Return bodies of all kinds of requests.

    They are greedy and seeded, longer than a chunk, with shared prefixes, with objectives that
    cannot be kept, best effort, and one may end by itself.
    """
    draw = random.Random(3)

    def ids(count: int) -> list[int]:
        return [draw.randrange(8, 4000) for _ in range(count)]

    shared = ids(48)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        (ids(5), greedy),
        (ids(17), {"temperature": 1.0, "seed": 11, "top_k": 40}),
        ([*shared, *ids(9)], greedy),
        ([*shared, *ids(30)], {"temperature": 0.8, "seed": 12, "ignore_eos": True}),
        (ids(150), greedy),
        (ids(190), {"temperature": 1.0, "seed": 13, "top_p": 0.9, "ignore_eos": True}),
        (ids(40), {**greedy, "ttft_slo_ms": 1, "tpot_slo_ms": 1}),
        (ids(33), {**greedy, "service_tier": "best_effort"}),
        (ids(64), {**greedy, "service_tier": "interactive", "repetition_penalty": 1.2}),
    ]
    return [
        {"model": MODEL, "prompt": prompt, "max_tokens": 5 + number, **more}
        for number, (prompt, more) in enumerate(kinds)
    ]


BODIES = bodies()


@contextmanager
def serving(machine: Any, config: ServeConfig, tokenizer: Tokenizer) -> Iterator[Live]:
    """Run a server on warm executors."""
    from jaxserve.engine.engine import Engine

    engine = Engine.on(machine.serving(config))
    live = Live(Service(engine, tokenizer, config))
    try:
        yield live
    finally:
        live.stop()
        engine.close()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Keep objects frozen from one engine to the next: each would scan all of them when it begins to serve."""
    from jaxserve.engine.runtime.gc_control import uncollected

    with uncollected():
        yield


@pytest.fixture(scope="module")
def machine(assembled: Callable[[str], Any]) -> Any:
    return assembled("2x1")


def answer(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """Return text, length and finish reason of an answer, or the status of a refusal."""
    said = live.http.post("/v1/completions", json=body)
    if said.status_code != 200:
        return {"status": said.status_code}
    found = said.json()
    choice, usage = found["choices"][0], found["usage"]
    return {"text": choice["text"], "tokens": usage["completion_tokens"], "reason": choice["finish_reason"]}


@pytest.fixture(scope="module")
def reference(assembled: Callable[[str], Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the answer of each request alone on 1x1."""
    alone = assembled("1x1")
    with serving(alone, replace(alone.config, policy="vllm"), tokenizer) as live:
        return [answer(live, body) for body in BODIES]


@pytest.mark.parametrize("case", cases(sample(), MATRIX), ids=",".join)
def test_every_name_is_served(case: Case, machine: Any, tokenizer: Tokenizer, reference: list[dict[str, Any]]) -> None:
    config = replace(machine.config, **case._asdict())
    with serving(machine, config, tokenizer) as live:
        with ThreadPoolExecutor(len(BODIES)) as threads:
            answers = list(threads.map(lambda body: answer(live, body), BODIES))
        live.quiet()
        # Planned steps and transfers may hold pages after the last answer.
        until(lambda: not any(one.pages_held for one in live.engine.stats().instances), live.engine.stats)
        live.engine.check()
        for body, mine, alone in zip(BODIES, answers, reference, strict=True):
            if mine.get("status") == 429 and case.admission.endswith(":refuse"):
                continue
            assert mine == alone, body
        check_metrics(case, live, [one for one in answers if "text" in one])


def check_metrics(case: Case, live: Live, done: Sequence[dict[str, Any]]) -> None:
    """Check `/metrics` against the answers; `done` are those that are not refusals."""
    told = live.sums()
    reasons = {one.labels["finished_reason"]: one.value for one in live.samples() if "finished_reason" in one.labels}
    assert told["prompt_tokens_total"] == sum(len(body["prompt"]) for body in BODIES)
    assert told["generation_tokens_total"] == sum(one["tokens"] for one in done)
    assert told["request_success_total"] == len(BODIES)
    for reason in ("stop", "length"):
        assert reasons[reason] == sum(one["reason"] == reason for one in done)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert told[f"{name}_count"] == len(done)
    later = [one["tokens"] - 1 for one in done if one["tokens"] > 1]
    assert told["inter_token_latency_seconds_count"] == sum(later)
    assert told["request_time_per_output_token_seconds_count"] == len(later)
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    total = told["e2e_request_latency_seconds_sum"]
    assert sum(told[f"{part}_seconds_sum"] for part in parts) == pytest.approx(total)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefill_backlog_tokens"):
        assert told[name] == 0, name
    assert told["compilations_after_warmup_total"] == told["pool_rebuilds_total"] == 0
    assert told["steps_total"] == told["measured_step_seconds_count"] == told["iteration_tokens_total_count"] > 0
    assert told["iteration_tokens_total_sum"] >= told["computed_prompt_tokens_total"] + sum(later)
    assert told["predicted_step_seconds_sum"] > 0 < told["measured_step_seconds_sum"]
    assert 0 <= told["slo_attainment"] <= 1 and told["slo_violations_total"] >= 1, "1 ms cannot be kept"
    assert told["computed_prompt_tokens_total"] + told["prefix_cache_hits_total"] >= sum(
        len(body["prompt"]) for body in BODIES
    ) or case.admission.endswith(":refuse")
    moved, deflected = told["kv_transfer_seconds_count"], told["deflections_total"]
    if case.mode == "colocated":
        assert moved == deflected == 0, "no request has a reason to move"
    else:
        assert moved + deflected > 0
    assert told["demotions_total"] < len(BODIES)


def test_build_settings_of_executors_are_unchanged(machine: Any) -> None:
    with pytest.raises(InvalidValue, match="max_num_seqs=9 must be 8, as built into these executors"):
        machine.serving(replace(machine.config, policy="vllm", max_num_seqs=9))


def test_schedulers_may_have_tighter_limits_than_executors(machine: Any) -> None:
    limits = replace(machine.limits, rows=2, stairs=())
    cluster = machine.serving(machine.config, limits).cluster(lambda request: None)
    assert {core.scheduler.limits for core in cluster.cores} == {limits} != {machine.limits}
