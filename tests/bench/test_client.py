"""Measurements of the benchmark client against a server with known delays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.bench.client import Outcome, Target, open_sender
from jaxserve.bench.drive import Run, drive
from jaxserve.bench.load import Call, Objective
from jaxserve.errors import InvalidValue
from tests.support.bench.endpoint import Endpoint
from tests.support.timing import in_time, once_in_time

SLACK = 0.06  # seconds


def go(endpoint: Endpoint, calls: list[Call], **target: Any) -> Run:
    async def run() -> Run:
        async with open_sender(Target(endpoint.url, "toy", **target)) as sender:
            return await drive(calls, sender)

    return asyncio.run(run())


def alone(endpoint: Endpoint, call: Call, **target: Any) -> Outcome:
    return go(endpoint, [call], **target).outcomes[0]


@pytest.mark.parametrize("chat", [False, True])
@once_in_time
def test_latencies_match_the_servers_delays(chat: bool) -> None:
    prompt = "one two three" if chat else (1, 2, 3)
    with Endpoint(ttft=0.2, gap=0.03).running() as endpoint:
        alone(endpoint, Call(0.0, prompt, 3, 2), chat=chat)  # warm-up of imports and connection
        outcome = alone(endpoint, Call(0.0, prompt, 3, 6), chat=chat)
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.output_tokens, len(outcome.itls)) == (3, 6, 5)
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itls))
    assert outcome.ttft >= 0.2
    in_time(outcome.ttft < 0.2 + SLACK, f"{outcome.ttft=}")
    in_time(outcome.tpot == pytest.approx(0.03, abs=SLACK / 5), f"{outcome.tpot=}")  # less after a late first token


def test_the_body_carries_lengths_and_objectives() -> None:
    target = {"headers": {"x-tenant": "a"}, "extra_body": {"priority": 3}, "api_key": "secret"}
    with Endpoint(ttft=0.0, gap=0.0).running() as endpoint:
        alone(endpoint, Call(0.0, (5, 6), 2, 3, Objective(500.0, None)), **target)
        alone(endpoint, Call(0.0, (5, 6), 2, 3), ignore_eos=False)
    first, second = endpoint.bodies
    assert first["prompt"] == [5, 6] and first["max_tokens"] == 3 and first["stream"] is True
    assert first["ttft_slo_ms"] == 500.0 and "tpot_slo_ms" not in first
    assert first["ignore_eos"] is True and first["priority"] == 3
    assert endpoint.headers[0]["x-tenant"] == "a" and endpoint.headers[0]["authorization"] == "Bearer secret"
    assert not {"ignore_eos", "ttft_slo_ms"} & set(second)


@pytest.mark.parametrize(
    ("server", "part"),
    [
        (Endpoint(fail=1), "the queue is full"),
        (Endpoint(ttft=0.0, gap=0.0, in_stream_error=True), "the device is gone"),
        (Endpoint(ttft=0.0, gap=0.0, cut=1), ""),
    ],
)
def test_failures_are_recorded_as_outcomes(server: Endpoint, part: str) -> None:
    with server.running() as endpoint:
        outcome = alone(endpoint, Call(0.0, (1,), 1, 4))
    assert not outcome.ok and part in outcome.error


@pytest.mark.parametrize(
    ("odd", "part"),
    [
        (b": ping\n\ndata: [DONE]\n\n", ""),
        (b"id: 1\n: ping\n\ndata:\n\ndata: [DONE]\n\n", ""),
        (b'data: {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}\n\n', ""),  # and no [DONE]
        (b'data: {"choices": null}\n\ndata: [DONE]\n\n', ""),
        (b"data: not JSON\n\n", "DecodeError"),
        (b'data: ["a list"]\n\n', "AttributeError"),
        (b'data: {"choices": [7]}\n\n', "AttributeError"),
        (b'data: {"choices": []}\n\n', "the stream broke off before [DONE]"),
    ],
)
def test_an_odd_event_fails_its_request_at_most(odd: bytes, part: str) -> None:
    with Endpoint(ttft=0.0, gap=0.0, odd=odd).running() as endpoint:
        first, second = (alone(endpoint, Call(0.0, (1,), 1, 4)) for _ in range(2))
    assert second.ok and first.ok == (not part) and part in first.error
    assert first.output_tokens >= 2


def test_a_run_that_is_stopped_keeps_what_has_ended() -> None:
    async def run(endpoint: Endpoint) -> Run:
        stop = asyncio.Event()

        def progress(done: int, total: int) -> None:
            if done == 2:
                stop.set()

        calls = [Call(at, (1,), 1, 1) for at in (0.0, 0.01, 3600.0, 7200.0)]
        async with open_sender(Target(endpoint.url, "toy")) as sender:
            return await drive(calls, sender, progress=progress, stop=stop)

    with Endpoint(ttft=0.0, gap=0.0).running() as endpoint:
        found = asyncio.run(run(endpoint))
    assert [outcome.ok for outcome in found.outcomes] == [True, True] and found.left == 2


def test_an_unreachable_server_fails_each_call() -> None:
    with Endpoint().running() as endpoint:
        pass
    assert "onnect" in alone(endpoint, Call(0.0, (1,), 1, 4)).error


def test_without_usage_each_chunk_counts_as_a_token() -> None:
    with Endpoint(ttft=0.0, gap=0.0, usage=False).running() as endpoint:
        outcome = alone(endpoint, Call(0.0, (1, 2), 2, 7))
    assert (outcome.prompt_tokens, outcome.output_tokens) == (2, 7)


@once_in_time
def test_calls_are_sent_on_time_whatever_the_outcome_of_others() -> None:
    with Endpoint(ttft=0.3, gap=0.0).running() as endpoint:
        alone(endpoint, Call(0.0, (1,), 1, 1))
        run = go(endpoint, [Call(at, (1,), 1, 1) for at in (0.0, 0.1, 0.2)])
    for outcome in run.outcomes:
        assert outcome.start >= outcome.call.at and outcome.ttft >= 0.3
        in_time(outcome.start == pytest.approx(outcome.call.at, abs=SLACK), f"{outcome.start=}")
        in_time(outcome.ttft == pytest.approx(0.3, abs=SLACK), f"{outcome.ttft=}")
    in_time(run.duration == pytest.approx(0.5, abs=2 * SLACK), f"{run.duration=}")


@once_in_time
def test_waiting_for_a_connection_counts_as_lag_and_not_ttft() -> None:
    async def run(endpoint: Endpoint) -> Run:
        async with open_sender(Target(endpoint.url, "toy")) as sender:
            return await drive([Call(0.0, (1,), 1, 1)] * 3, sender, max_concurrency=1)

    with Endpoint(ttft=0.1, gap=0.0).running() as endpoint:
        outcomes = asyncio.run(run(endpoint)).outcomes
    lags = [outcome.lag for outcome in outcomes]
    in_time(lags == pytest.approx([0.0, 0.1, 0.2], abs=2 * SLACK), f"{lags=}")
    in_time(all(outcome.ttft < 0.1 + SLACK for outcome in outcomes), f"{outcomes=}")


def test_a_chat_endpoint_takes_no_token_ids() -> None:
    with pytest.raises(InvalidValue, match="text"):
        Target("", "toy", chat=True).standard(Call(0.0, (1, 2), 2, 1))
