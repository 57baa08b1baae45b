"""Prometheus metrics of requests, under vLLM's names after a prefix, with those of the engine."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.generation.generate import Piece, Submission
from jaxserve.outputs import RequestMetrics
from jaxserve.server.engine_metrics import EngineCollector
from jaxserve.settings.operations import PREFIX

SHARED = (
    "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client shares values among processes if this is set when it is imported
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, so that its dashboards work.
# fmt: off
_TTFT = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
_TPOT = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_N = (1, 2, 5, 10, 20)
_UNENDED = 4096  # prompts with n > 1 some of whose outputs have ended; those that fail stay until then
_HELD = (0, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40)
# fmt: on

_TIMES: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Time from arrival to the first token.", _TTFT),
    ("inter_token_latency_seconds", "Time between two tokens of a request.", _TPOT),
    ("request_time_per_output_token_seconds", "Mean time per token after the first, by request.", _TPOT),
    ("e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST),
    ("request_queue_time_seconds", "Time from arrival to the request's first step.", _REQUEST),
    ("request_prefill_time_seconds", "Time from the first step to the first token.", _REQUEST),
    ("request_decode_time_seconds", "Time from the first to the last token.", _REQUEST),
    ("request_inference_time_seconds", "Time from the first step to the last token.", _REQUEST),
)


class Metrics:
    """The metrics of one server. Writer: its event loop."""

    def __init__(self, engine: Any, model_name: str, prefix: str = PREFIX) -> None:
        """Register all metrics. `engine.stats()` is read at each scrape."""
        self.prefix = prefix
        self.registry = CollectorRegistry()
        self._shared = SHARED in os.environ
        if self._shared:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self.registry)
        self.registry.register(EngineCollector(engine, model_name, prefix))
        steps = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
        lengths = [step for step in steps if step <= engine.info.max_model_len]
        self._histograms = {
            name: self._make(Histogram, name, text, buckets=buckets).labels(model_name)
            for name, text, buckets in (
                *_TIMES,
                ("request_prompt_tokens", "Prompt tokens, by request.", lengths),
                ("request_generation_tokens", "Generated tokens, by request.", lengths),
                ("request_max_num_generation_tokens", "Most tokens of the outputs of a prompt, by prompt.", lengths),
                ("request_params_max_tokens", "max_tokens, of requests that set it.", lengths),
                ("request_params_n", "n, by prompt.", _N),
            )
        }
        self._unended: OrderedDict[int, tuple[Submission, int, int]] = OrderedDict()  # longest output, outputs left
        text = "Time for which pacing held computed tokens back. All other metrics use the time of computation."
        # Called with the seconds for which a piece was held back.
        self.held = self._make(Histogram, "token_pacing_delay_seconds", text, buckets=_HELD).labels(model_name).observe
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens.").labels(model_name)
        text = "Requests that continued on another replica after theirs was lost."
        self.continued = self._make(Counter, "continued_requests", text).labels(model_name).inc
        self._tokens = self._make(Counter, "generation_tokens", "Generated tokens.").labels(model_name)

    def _make(self, kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
        registry = None if self._shared else self.registry  # the shared files have it
        return kind(self.prefix + name, text, ["model_name", *labels], registry=registry, **more)

    def begun(self, job: Submission) -> None:
        """Count a request when its first output arrives."""
        self._prompt_tokens.inc(len(job.request.prompt) * job.request.params.n)
        self._see("request_params_n", job.request.params.n)
        if job.request.params.max_tokens is not None:
            self._see("request_params_max_tokens", job.request.params.max_tokens)

    def news(self, job: Submission, piece: Piece) -> None:
        if piece.tokens:
            self._tokens.inc(len(piece.tokens))
        if piece.metrics is not None and piece.finish_reason in ("stop", "length"):
            self._finished(job, piece.metrics)

    def _finished(self, job: Submission, times: RequestMetrics) -> None:
        see, tokens = self._see, times.token_times
        see("request_prompt_tokens", len(job.request.prompt))
        see("request_generation_tokens", len(tokens))
        self._see_longest(job, len(tokens))
        if times.scheduled is not None:
            see("request_queue_time_seconds", times.scheduled - times.arrival)
        ttft, tpot = times.ttft, times.tpot
        if ttft is None or not tokens:
            return
        see("time_to_first_token_seconds", ttft)
        see("e2e_request_latency_seconds", tokens[-1] - times.arrival)
        see("request_decode_time_seconds", tokens[-1] - tokens[0])
        if times.scheduled is not None:
            see("request_prefill_time_seconds", tokens[0] - times.scheduled)
            see("request_inference_time_seconds", tokens[-1] - times.scheduled)
        for before, after in pairwise(tokens):
            see("inter_token_latency_seconds", after - before)
        if tpot is not None:
            see("request_time_per_output_token_seconds", tpot)

    def _see_longest(self, job: Submission, tokens: int) -> None:
        """Record the longest output of a prompt once its n outputs have ended."""
        _, longest, left = self._unended.pop(id(job), (job, 0, job.request.params.n))
        longest, left = max(longest, tokens), left - 1
        if not left:
            self._see("request_max_num_generation_tokens", longest)
            return
        self._unended[id(job)] = job, longest, left  # with the job, so that no other one gets its id
        if len(self._unended) > _UNENDED:
            self._unended.popitem(last=False)

    def _see(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def text(self) -> bytes:
        """Return the response body of `/metrics`."""
        return generate_latest(self.registry)
