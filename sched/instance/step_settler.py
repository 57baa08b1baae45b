"""From the result of a step to requests: sampled tokens, verified drafts, failed rows, cached pages."""

from __future__ import annotations

from typing import NamedTuple

from ..api.acceptance import Acceptance
from ..api.plan import Delta, Span, StepPlan, StepResult, token_delta
from ..api.policy import Role
from ..api.request import Request, State
from ..metrics import FINISHED
from .kv_manager import KVManager
from .request_queues import RequestQueues
from .stats import Counters
from .trials import Trials


class Settled(NamedTuple):
    """The changes that a finished step made."""

    deltas: tuple[Delta, ...]
    advanced: tuple[tuple[Request, int], ...]  # if it prefills: requests, and tokens with KV now


class StepSettler:
    """Applies the result of one step. Writes the Requests, KVManager, RequestQueues and totals of its Scheduler."""

    def __init__(
        self, queues: RequestQueues, memory: KVManager, counters: Counters, drafts: Acceptance, trials: Trials
    ) -> None:
        self._queues = queues
        self._kv = memory
        self._counters = counters
        self._drafts = drafts
        self._trials = trials

    def settle(self, plan: StepPlan, result: StepResult) -> Settled:
        """Apply the result of each span to its request."""
        requests, prefills = self._queues.requests, self._queues.role is Role.PREFILL
        caching = self._kv.blocks.prefix_caching
        deltas: list[Delta] = []
        advanced: list[tuple[Request, int]] = []
        for index, span in enumerate(plan.spans):
            request = requests[span.request]
            request.inflight -= 1
            if request.failures:
                self._trials.passed(request, span.start + span.length)
            if request.state is State.FINISHED:
                self._counters.surplus_tokens += span.length
                forget(request, self._queues, self._kv)
                continue
            if index in result.failed:
                deltas += self._condemn(request, result.failed[index])
                continue
            if index in result.ended:
                deltas.append(finish(request, self._queues, self._kv, "rejected", result.ended[index]))
                continue
            if prefills and span.samples and not (request.decodes_in_place or request.inflight):
                request.state = State.TRANSFERRING
            end = span.start + span.length
            if span.draft:
                end = self._verify(request, span, len(result.tokens[index]))
            elif caching:
                self._kv.register(request, span.start, end)
            delta = self._gain(request, result, index, span)
            if delta is not None:
                deltas.append(delta)
            if span.draft:
                finished = request.state is State.FINISHED
                self._drafts.count(request.tier, request.drafted, span.draft, end - span.start - 1, cut=finished)
                if not finished:
                    self._kv.register(request, span.start, end)
                    self._queues.file(request)
            if (request.slow or index in result.held) and request.state is not State.FINISHED:
                self._hold(request, index in result.held)
            if prefills and request.state is not State.FINISHED:
                advanced.append((request, end))
        return Settled(tuple(deltas), tuple(advanced))

    def _verify(self, request: Request, span: Span, gained: int) -> int:
        """Move the cursor back over rejected draft tokens. Returns where valid KV ends."""
        wrong = span.length - gained
        request.drafting = 0
        request.computed -= wrong
        request.take_back(wrong)
        self._counters.verified(span.draft, gained - 1)
        return span.start + gained

    def _gain(self, request: Request, result: StepResult, index: int, span: Span) -> Delta | None:
        """Append the sampled tokens, up to one that ends the request."""
        tokens = result.tokens[index]
        logprobs = result.logprobs.get(index, ()) if result.logprobs else ()
        prompt_logprobs = result.prompt_logprobs.get(index, ()) if result.prompt_logprobs else ()
        if prompt_logprobs:  # do not repeat what was reported before its KV was dropped
            prompt_logprobs = prompt_logprobs[max(0, request.scored - span.start) :]
            request.scored = max(request.scored, span.start + len(result.prompt_logprobs[index]))
        if request.pooled is not None and index in result.pooled:
            request.pooled.add(span.start, span.length, result.pooled[index])
        if not tokens:
            return Delta(request.id, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
        reason = stop_token = None
        stage = request.stage
        for count, token in enumerate(tokens, 1):
            reason = request.gain(token, result.finished)
            if reason is not None:
                tokens, logprobs = tokens[:count], logprobs[:count]
                stop_token = token if reason == "stop" else None
                break
        if request.pooled is not None:  # it wants no text
            tokens, logprobs, stop_token = (), (), None
        self._counters.generated_tokens += len(tokens)
        if reason is not None:
            finish(request, self._queues, self._kv, reason)
        elif len(request.output) == 1 or request.stage is not stage:
            self._queues.file(request)  # its deadline has a new anchor or rate
        if reason is None and not logprobs and not prompt_logprobs:
            return token_delta(request.id, tokens)
        pooled = b"" if request.pooled is None else request.pooled.vector()
        return Delta(request.id, tokens, logprobs, prompt_logprobs, reason, None, stop_token, pooled)

    def _hold(self, request: Request, held: bool) -> None:
        """Keep a request out of steps until `Scheduler.unhold`, or let it take part in them as others do."""
        self._counters.held += held
        request.slow = request.held = held
        self._queues.file(request)

    def _condemn(self, request: Request, why: str) -> list[Delta]:
        """End a request whose row failed, and all requests that share pages it computed."""
        own = self._kv.condemn(request)
        others = (other for other in self._queues.requests.values() if other is not request)
        condemned = [request, *(other for other in others if not own.isdisjoint(other.pages))]
        alive = [failed for failed in condemned if failed.state is not State.FINISHED]
        return [finish(failed, self._queues, self._kv, "error", why) for failed in alive]


def finish(request: Request, queues: RequestQueues, memory: KVManager, reason: str, error: str | None = None) -> Delta:
    """End a request."""
    request.state, request.finish_reason, request.error = State.FINISHED, reason, error
    queues.unfile(request)
    if reason in FINISHED:
        memory.pin(request)
    forget(request, queues, memory)
    return Delta(request.id, finish_reason=reason, error=error)


def forget(request: Request, queues: RequestQueues, memory: KVManager) -> None:
    """Release the pages of a finished request, once no submitted step uses them."""
    if request.inflight == 0:
        memory.vacate(request)
        queues.requests.pop(request.id, None)
