"""OpenTelemetry traces: a span per HTTP request, with the phases of its outputs as children.

Spans are made once a request has ended, from the times in its RequestMetrics, so tracing costs nothing while
tokens are computed, and engines in other processes need to know nothing about it.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.errors import InvalidValue
from jaxserve.generation.generate import Submission
from jaxserve.install import needs
from jaxserve.outputs import RequestMetrics
from jaxserve.settings.operations import OperationSettings
from jaxserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
SPAN = "llm_request"  # vLLM's name
CLOSING = 2.0  # seconds
BILLION = 1_000_000_000


class Phase(NamedTuple):
    """A part of a request, in seconds on the engine's clock."""

    name: str
    start: float
    end: float


def phases(times: RequestMetrics) -> Iterator[Phase]:
    """Yield the phases of an output: queue, prefill, transfer and decode, without those that it did not reach.

    An output that another engine began has no times of its prefill: all before its first token is `prefill`,
    and what passed until this engine took it up is `transfer`.
    """
    first, last = times.first_token, times.finished
    scheduled, transferred = times.scheduled, times.transferred
    if first is not None and scheduled is not None and scheduled > first:
        scheduled, transferred = None, scheduled
    if scheduled is not None:
        yield Phase("queue", times.arrival, scheduled)
    if first is None:
        return
    yield Phase("prefill", times.arrival if scheduled is None else scheduled, first)
    begun = first
    if transferred is not None and transferred > first:
        yield Phase("transfer", first, transferred)
        begun = transferred
    if last is not None and last > begun:
        yield Phase("decode", begun, last)


class Ended(NamedTuple):
    """An output that has ended."""

    number: int  # of the prompt
    choice: int
    job: Submission
    times: RequestMetrics
    reason: str | None


@dataclass
class Trace:
    """The trace of one HTTP request. Writer: the coroutine that serves it."""

    parent: Any  # the context of the client's span
    id: str
    model: str
    ended: list[Ended] = field(default_factory=list)


class Tracing:
    """Makes spans and sends them, in batches, from a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("jaxserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def of(cls, settings: OperationSettings) -> Tracing | None:
        """Return the tracing of a server, None without --otlp-traces-endpoint. Raises InvalidValue."""
        if settings.otlp_traces_endpoint is None:
            return None
        check_tracing(settings)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "jaxserve")
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name, "service.version": __version__}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.otlp_traces_endpoint)))
        return cls(provider)

    def begin(self, headers: Mapping[str, str], id: str, model: str) -> Trace:
        """Return the trace of a request, below the span that its `traceparent` names, if any."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        return Trace(self._propagator.extract(carrier), id, model)

    def export(self, trace: Trace, begun: int, ended: int, error: str | None) -> None:
        """Make the spans of a request. begun, ended: nanoseconds since 1970. `error` says why the request failed."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        attributes = _attributes(trace)
        whole = self._tracer.start_span(
            SPAN, trace.parent, kind=SpanKind.SERVER, attributes=attributes, start_time=begun
        )
        if error is not None:
            whole.set_status(Status(StatusCode.ERROR, error))
        if whole.is_recording():
            inside = set_span_in_context(whole, trace.parent)
            for output in trace.ended:
                self._children(output, inside, begun)
        whole.end(ended)

    def _children(self, ended: Ended, inside: Any, begun: int) -> None:
        """Make the spans of an output. Its arrival is when the request began, whatever the engine's clock says."""
        which = {"jaxserve.prompt": ended.number, "jaxserve.choice": ended.choice}
        for phase in phases(ended.times):
            start, end = (
                begun + round((at - ended.times.arrival) * BILLION) for at in (phase.start, max(phase.start, phase.end))
            )
            span = self._tracer.start_span(phase.name, inside, attributes=which, start_time=start)
            if phase.name == "decode":
                span.set_attribute("gen_ai.usage.completion_tokens", len(ended.times.token_times))
            span.end(end)

    def close(self) -> None:
        """Send what is left and stop, within CLOSING seconds: a collector that is away must not hold a server up."""
        closing = threading.Thread(target=self._provider.shutdown, name="jaxserve-traces", daemon=True)
        closing.start()
        closing.join(CLOSING)


def _attributes(trace: Trace) -> dict[str, Any]:
    """Return the attributes of a request; latencies are those of its first output."""
    attributes: dict[str, Any] = {"gen_ai.request.id": trace.id, "gen_ai.response.model": trace.model}
    if not trace.ended:
        return attributes
    output = trace.ended[0]
    params, times, slo = output.job.request.params, output.times, output.job.request.slo
    prompts = {ended.number: len(ended.job.request.prompt) for ended in trace.ended}
    attributes |= {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.prompt_tokens": sum(prompts.values()),
        "gen_ai.usage.completion_tokens": sum(
            len(ended.times.token_times) for ended in trace.ended if ended.job.request.params.pooling is None
        ),
        "gen_ai.response.finish_reasons": [ended.reason or "" for ended in trace.ended],
        "jaxserve.tier": output.job.request.tier,
        "jaxserve.cached_tokens": times.cached,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    names = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}
    for phase in phases(times):
        if phase.name in names:
            attributes[f"gen_ai.latency.{names[phase.name]}"] = phase.end - phase.start
    if times.finished is not None:
        attributes["gen_ai.latency.e2e"] = times.finished - times.arrival
        if times.scheduled is not None:
            attributes["gen_ai.latency.time_in_model_inference"] = times.finished - times.scheduled
    measured = {"ttft": (times.ttft, slo.ttft), "tpot": (times.tpot, slo.tpot)}
    if times.ttft is not None:
        attributes["gen_ai.latency.time_to_first_token"] = times.ttft
    for name, (seconds, goal) in measured.items():
        if isfinite(goal):
            attributes[f"jaxserve.slo.{name}"] = goal
            if seconds is not None:
                attributes[f"jaxserve.slo.{name}_attained"] = seconds <= goal
    return attributes


def check_tracing(settings: OperationSettings) -> None:
    """Raise InvalidValue if traces are wanted and cannot be sent."""
    if settings.otlp_traces_endpoint is None:
        return
    name = "otlp_traces_endpoint"
    for variable in PROTOCOLS:
        asked = os.environ.get(variable)
        if asked not in (None, PROTOCOL):
            raise InvalidValue(f"{variable}={asked!r} must be {PROTOCOL}: traces are sent over HTTP", name)
    for module in MODULES:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            given = f"{name}={settings.otlp_traces_endpoint!r}"
            raise InvalidValue(f"{given} needs OpenTelemetry: {needs('otel')}", name)
