"""Deflection and best effort over HTTP on a real engine: deflected, demoted and refused requests are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from jaxserve.server.service import Service
from tests.support.server.live import Live
from tests.support.timing import until

PAGES = 24  # KV for little more than one long request
PROMPTS = [f"def add_{n}(a, b):\n    " + "x = a + b\n    " * 12 for n in range(8)]


@pytest.fixture(scope="module")
def start(assembled, tokenizer) -> Iterator[Callable[..., Live]]:
    """A factory of servers with a real engine on a mesh, whose schedulers see at most `pages`."""
    from jaxserve.engine.engine import Engine

    made: list[Live] = []

    def begin(mesh: str, pages: int | None = None, **settings) -> Live:
        machine = assembled(mesh)
        config = replace(machine.config, **settings)
        limits = replace(machine.limits, pages=pages or machine.limits.pages)
        made.append(Live(Service(Engine.on(machine.serving(config, limits)), tokenizer, config)))
        return made[-1]

    yield begin
    for one in made:
        one.stop()
        one.engine.close()


@pytest.fixture(scope="module")
def deflecting(start) -> Live:
    return start(mesh="2x1", policy="distserve", routing="deflect:faster", admission="pab")


@pytest.fixture(scope="module")
def refusing(start) -> Live:
    """A server with few pages."""
    return start(mesh="1x1", policy="fairbatching", admission="pab:refuse", pages=PAGES)


def ask(live: Live, prompt: str, **more) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True, **more}
    return live.http.post("/v1/completions", json=body)


def together(live: Live, *bodies: dict) -> list[httpx.Response]:
    """Send all requests at once; returns the answers in order."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: ask(live, **body), bodies))


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def alone(deflecting) -> list[str]:
    """The answer to each prompt without others."""
    answers = [text(ask(deflecting, prompt, service_tier="best_effort")) for prompt in PROMPTS]
    deflecting.quiet()
    return answers


def test_prompts_are_deflected_and_their_tokens_do_not_change(deflecting, alone):
    before = deflecting.sums()["deflections_total"]
    for _ in range(3):
        bodies = [{"prompt": prompt, "ttft_slo_ms": 60_000, "tpot_slo_ms": 60_000} for prompt in PROMPTS]
        assert [text(answer) for answer in together(deflecting, *bodies)] == alone
    stats = deflecting.engine.stats()
    assert deflecting.sums()["deflections_total"] - before == stats.deflections - before > 0
    counted = [stats.ttft_predictions[path].count for path in ("prefill", "decode")]
    assert sum(counted) >= 24 and counted[1] > 0
    told = {(one.name.removeprefix("jaxserve:"), one.labels.get("path")): one.value for one in deflecting.samples()}
    for path, count in zip(("prefill", "decode"), counted, strict=True):
        assert told["predicted_ttft_seconds_count", path] == count
        if count:
            one = stats.ttft_predictions[path]
            assert told["ttft_prediction_mape", path] == pytest.approx(one.mape)
            assert told["ttft_prediction_median_error", path] == pytest.approx(one.median)
    deflecting.quiet()
    deflecting.engine.check()


def test_hopeless_requests_become_best_effort_and_finish(deflecting, alone):
    """Prompts with an impossible TTFT among others wait, finish, and keep their tokens."""
    before = deflecting.sums()["demotions_total"]
    bodies = [{"prompt": prompt, "ttft_slo_ms": 0.001 if n % 2 else 60_000} for n, prompt in enumerate(PROMPTS)]
    assert [text(answer) for answer in together(deflecting, *bodies)] == alone
    assert deflecting.sums()["demotions_total"] - before >= 4
    deflecting.quiet()
    deflecting.engine.check()


def test_hopeless_requests_are_refused_if_the_flag_says(refusing):
    bodies = [{"prompt": prompt, "ttft_slo_ms": 0.001 if n % 2 else 60_000} for n, prompt in enumerate(PROMPTS)]
    for n, answer in enumerate(together(refusing, *bodies)):
        if n % 2:
            error = answer.json()["error"]
            assert answer.status_code == 429 and error["code"] == "slo_unattainable" and answer.headers["Retry-After"]
        else:
            assert answer.status_code == 200
    assert ask(refusing, PROMPTS[0], service_tier="best_effort").status_code == 200  # without objectives, never refused
    assert refusing.sums()["request_success_total"] >= 9


def test_best_effort_gives_its_pages_to_requests_with_objectives(refusing):
    """Best effort fills the pool, loses its KV but no token to later requests, and ends after them."""
    live, long = refusing, {"max_tokens": 90, "ttft_slo_ms": 600_000, "tpot_slo_ms": 60_000}
    alone = [text(ask(live, prompt, **long)) for prompt in PROMPTS[:3]]
    live.quiet()
    free = [{"prompt": prompt, "service_tier": "best_effort", "max_tokens": 90} for prompt in PROMPTS[:3]]
    kept = [{"prompt": prompt, **long} for prompt in PROMPTS[:3]]
    before = live.engine.stats().counters.generated_tokens
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(together, live, *free)
        until(lambda: live.engine.stats().counters.generated_tokens != before)
        assert [text(answer) for answer in together(live, *kept)] == alone
    assert [text(answer) for answer in answers.result()] == alone
    assert live.sums()["num_preemptions_total"] > 0
    live.quiet()
    live.engine.check()
