"""Prometheus metrics per API key. The number of series depends on the keys only, not on requests."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.server.fairness import Stage
from jaxserve.settings.operations import PREFIX

REASONS = ("queue_full", "queue_share", "queue_timeout", "token_rate")  # of refusals


class StageCollector(Collector):
    """A collector of each client's requests and tokens, read at each scrape."""

    def __init__(self, stage: Stage, model_name: str, prefix: str = PREFIX) -> None:
        self._stage = stage
        self._model = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        prefix, labels, clients = self._prefix, ["model_name", "api_key"], self._stage.clients
        running = GaugeMetricFamily(prefix + "client_requests_running", "Requests in the engine.", labels=labels)
        waiting = GaugeMetricFamily(
            prefix + "client_requests_waiting", "Requests waiting for admission.", labels=labels
        )
        admitted = CounterMetricFamily(prefix + "client_requests", "Requests admitted: prompts times n.", labels=labels)
        tokens = CounterMetricFamily(prefix + "client_tokens", "Prompt and generated tokens.", labels=[*labels, "kind"])
        refused = CounterMetricFamily(prefix + "client_refusals", "Requests refused.", labels=[*labels, "reason"])
        for name, client in clients.items():
            own = [self._model, name]
            running.add_metric(own, client.inside)
            waiting.add_metric(own, client.waiting)
            admitted.add_metric(own, client.requests)
            for kind in ("prompt", "generation"):
                tokens.add_metric([*own, kind], client.tokens[kind])
            for reason in REASONS:
                refused.add_metric([*own, reason], client.refused[reason])
        yield from (running, waiting, admitted, tokens, refused)
