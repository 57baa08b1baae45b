"""Traces: phases add up, clients' traces are continued, and a collector gets spans by OTLP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed: .[otel]")
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.outputs import RequestMetrics
from jaxserve.server import tracing
from jaxserve.server.tracing import Tracing, check_tracing, phases
from tests.support.server.collector import Collector
from tests.support.timing import PATIENCE, in_time, once_in_time, until

BODY: dict[str, Any] = {"prompt": "def main(", "max_tokens": 5, "temperature": 0.5, "ttft_slo_ms": 60_000}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Memory:
    """A server whose spans stay in memory."""

    def __init__(self, live: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        live.service.tracing = Tracing(provider)
        self.live = live

    def spans(self, count: int) -> dict[str, Any]:
        """Return the spans by name, once there are so many."""
        until(lambda: len(self._exporter.get_finished_spans()) >= count)
        found = self._exporter.get_finished_spans()
        assert len(found) == count, [one.name for one in found]
        self._exporter.clear()
        return {one.name: one for one in found}


@pytest.fixture(scope="module")
def served(fakes) -> Any:
    return fakes(delay=0.005)


@pytest.fixture
def memory(served) -> Iterator[Memory]:
    yield Memory(served)
    served.engine.fail_after = None


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_a_request_is_a_span_with_its_phases_as_children(memory):
    memory.live.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
    spans = memory.spans(4)
    whole = spans.pop(tracing.SPAN)
    assert whole.parent is None and whole.status.status_code is StatusCode.UNSET
    told = dict(whole.attributes)
    assert told["gen_ai.request.id"] == "cmpl-mine" and told["gen_ai.response.model"] == "jaxserve-demo"
    assert told["gen_ai.request.max_tokens"] == told["gen_ai.usage.completion_tokens"] == 5
    assert told["gen_ai.request.n"] == 1 and told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["jaxserve.slo.ttft"] == 60.0 and told["jaxserve.slo.ttft_attained"] is True
    prompt = memory.live.http.post("/tokenize", json={"prompt": BODY["prompt"]}).json()["count"]
    assert told["gen_ai.usage.prompt_tokens"] == prompt
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    for one in (queue, prefill, decode):
        assert one.parent.span_id == whole.context.span_id and one.context.trace_id == whole.context.trace_id
    assert queue.start_time == whole.start_time and queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time <= whole.end_time + 5_000_000  # the engine's clock begins a moment after the request
    lengths = {one.name: (one.end_time - one.start_time) / 1e9 for one in (queue, prefill, decode)}
    assert lengths["queue"] == pytest.approx(told["gen_ai.latency.time_in_queue"], abs=1e-6)
    assert lengths["prefill"] == pytest.approx(told["gen_ai.latency.time_in_model_prefill"], abs=1e-6)
    assert lengths["decode"] == pytest.approx(told["gen_ai.latency.time_in_model_decode"], abs=1e-6)
    assert lengths["decode"] >= 4 * 0.005
    ttft = told["gen_ai.latency.time_to_first_token"]
    assert sum(lengths.values()) == pytest.approx(told["gen_ai.latency.e2e"], abs=1e-6)
    assert ttft == pytest.approx(lengths["queue"] + lengths["prefill"], abs=1e-6)


@pytest.mark.parametrize(("flags", "kept"), [("01", True), ("00", False)])
def test_the_trace_of_the_client_continues_if_it_is_sampled(memory, flags, kept):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
    memory.live.http.post("/v1/completions", json=BODY, headers=headers)
    memory.live.quiet()
    spans = memory.spans(4 if kept else 0)
    if kept:
        whole = spans[tracing.SPAN]
        assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == SPAN


def test_a_broken_traceparent_begins_a_new_trace(memory):
    answer = memory.live.http.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
    assert answer.status_code == 200 and memory.spans(4)[tracing.SPAN].parent is None


def test_every_output_has_phases(memory):
    memory.live.http.post("/v1/completions", json={**BODY, "prompt": ["a", "b"], "n": 2})
    whole = memory.spans(1 + 4 * 3)[tracing.SPAN]
    assert whole.attributes["gen_ai.usage.completion_tokens"] == 20


def test_failures_and_clients_that_leave_are_errors(memory):
    memory.live.engine.fail_after = 2
    assert memory.live.http.post("/v1/completions", json=BODY).status_code == 500
    failed = memory.spans(4)[tracing.SPAN]
    assert failed.status.status_code is StatusCode.ERROR and "out of luck" in failed.status.description
    memory.live.engine.fail_after = None
    with memory.live.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as stream:
        next(stream.iter_lines())
    left = memory.spans(1)[tracing.SPAN]
    assert left.status.status_code is StatusCode.ERROR and "left" in left.status.description


def test_a_trace_is_as_long_as_its_request_while_the_clock_is_set(memory, monkeypatch):
    times = iter((10**18, 10**18 - 3600 * 10**9))
    monkeypatch.setattr("jaxserve.server.service.time.time_ns", lambda: next(times, 0))
    assert memory.live.http.post("/v1/completions", json=BODY).status_code == 200
    whole = memory.spans(4)[tracing.SPAN]
    assert whole.start_time == 10**18 and 0 < whole.end_time - whole.start_time < PATIENCE * 1e9


def test_refused_requests_have_no_trace(memory):
    assert memory.live.http.post("/v1/completions", json={**BODY, "max_tokens": -1}).status_code == 400
    memory.spans(0)


@pytest.fixture
def real(live) -> Iterator[Memory]:
    """A prefill and a decode instance of a real engine, as in another process."""
    yield Memory(live)
    live.service.tracing = None


def test_a_transfer_between_instances_is_a_phase(real):
    real.live.http.post("/v1/completions", json={**BODY, "prompt": "x = [" + "1, " * 30, "ignore_eos": True})
    spans = real.spans(5)
    assert spans["prefill"].end_time == spans["transfer"].start_time
    assert spans["transfer"].end_time == spans["decode"].start_time


def test_embeddings_have_a_trace(real):
    answer = real.live.http.post("/v1/embeddings", json={"input": "a, b"}, headers={"X-Request-Id": "mine"}).json()
    spans = real.spans(3)
    told = spans[tracing.SPAN].attributes
    assert set(spans) == {tracing.SPAN, "queue", "prefill"} and told["gen_ai.request.id"] == "embd-mine"
    assert told["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == 0


@given(st.lists(st.floats(0, 1e4), min_size=5, max_size=5), st.booleans(), st.booleans())
def test_phases_follow_each_other(moments, moved, continued):
    arrival, scheduled, first, transferred, last = sorted(moments)
    if continued:  # another engine gave the first token
        scheduled, first = first, scheduled
    given = RequestMetrics(arrival, scheduled, first, last, (first, last), 0, transferred if moved else None)
    made = list(phases(given))
    assert made[0].start == arrival and made[-1].end <= last
    for before, after in pairwise(made):
        assert before.end == after.start
    assert all(one.start <= one.end for one in made)
    assert [one.name for one in made] == [
        name for name in ("queue", "prefill", "transfer", "decode") if name in {one.name for one in made}
    ]


def test_phases_that_were_not_reached_are_left_out():
    assert not list(phases(RequestMetrics(1.0, None, None, None)))
    assert [one.name for one in phases(RequestMetrics(1.0, 2.0, None, None))] == ["queue"]
    assert [one.name for one in phases(RequestMetrics(1.0, 2.0, 3.0, 3.0, (3.0,)))] == ["queue", "prefill"]


def test_a_collector_gets_the_spans(fake, collector):
    live = fake(config={"otlp_traces_endpoint": collector.url})
    live.http.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    live.quiet()
    live.stop()  # sends what is left
    assert {span.name for span in collector.spans} == {tracing.SPAN, "queue", "prefill", "decode"}
    (whole,) = collector.named(tracing.SPAN)
    assert whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == SPAN and whole.kind == 2  # SERVER
    told = {one.key: one.value for one in whole.attributes}
    assert told["gen_ai.usage.completion_tokens"].int_value == 5
    assert abs(whole.start_time_unix_nano / 1e9 - time.time()) < 60
    assert collector.services == {"jaxserve"}


@once_in_time
def test_a_collector_that_is_away_harms_no_request(fake, monkeypatch):
    monkeypatch.setattr(tracing, "CLOSING", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds in which the exporter tries again
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens
        live = fake(config={"otlp_traces_endpoint": f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces"})
        assert live.http.post("/v1/completions", json=BODY).status_code == 200
        begun = time.monotonic()
        with suppress(OSError):
            live.stop()
        in_time(time.monotonic() - begun < tracing.CLOSING + 3)
    for thread in threading.enumerate():  # its random waits would disturb tests of hypothesis
        if thread.name == "jaxserve-traces":
            thread.join(20)
            assert not thread.is_alive()


def test_what_is_missing_is_told_at_the_start(monkeypatch):
    settings = ServeConfig.load(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    check_tracing(settings)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(InvalidValue, match="'grpc' must be http/protobuf"):
        check_tracing(settings)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setattr(tracing, "MODULES", ("jaxserve.none",))
    with pytest.raises(InvalidValue, match=r"pip install .*\[otel\]'"):
        check_tracing(settings)
