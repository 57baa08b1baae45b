"""From a Decision to spans: limits, admission, page allocation and preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..api.errors import PolicyError
from ..api.perf import Load
from ..api.plan import Begin, Span, decoding
from ..api.policy import Decision, Limits
from ..api.preemption import LEAD
from ..api.request import BEST_EFFORT, Request, State
from ..feasibility import GRID, largest_chunk
from .kv_manager import KVManager, Reservation
from .request_queues import RequestQueues
from .stairs import Chunk, fitted


class BuiltStep(NamedTuple):
    """A legal step, and the requests that were admitted or dropped for it."""

    spans: tuple[Span, ...]
    load: Load
    admitted: tuple[Request, ...]
    dropped: tuple[Request, ...]  # lost their KV to requests that rank before them


class StepBuilder:
    """The builder of one step. Writes the Requests, KVManager and RequestQueues of its Scheduler."""

    def __init__(
        self,
        queues: RequestQueues,
        memory: KVManager,
        limits: Limits,
        start: float,
        *,
        busy: bool,
        kv_waiting: bool = False,
        seconds: Callable[[Load], float] | None = None,
    ) -> None:
        """seconds: predicts the time of a load; with it, prompt chunks are fitted to `Limits.stairs`."""
        self._queues = queues
        self._kv = memory
        self._limits = limits
        self._start = start
        self._busy = busy  # a step is running, so no pages can be taken from running requests
        self._yields = busy and kv_waiting  # skip best effort, so that its pages can be taken after the running step
        self._admitting = True
        self._admitted: list[Request] = []
        self._dropped: list[Request] = []
        self._seconds = seconds
        self._prompts = Load()  # the step's chunks so far, if a stop is bounded
        self._stepped: list[Request] = []  # rows of the decode queue to update after the build

    def build(self, decision: Decision) -> BuiltStep:
        """Build the step. Raises PolicyError if the policy grants a request that is not in its view."""
        budget, most = self._limits.tokens, self._limits.rows
        prompts = min(self._limits.prompts, decision.prompts)
        requests, runnable, size = self._queues.requests, self._queues.runnable, self._kv.blocks.page_size
        decision, kept = self._best_effort_last(decision)
        spans: list[Span] = []
        chunks: list[tuple[int, Request, Chunk]] = []  # each with its position in the spans
        decode = longest = context = drafts = 0
        for position, (id, tokens, wanted) in enumerate(decision.grants):
            if budget <= 0 or len(spans) >= most:
                break
            if not runnable(id):
                self._check_displaced(id)
                continue
            request = requests[id]
            if request.failures and spans:
                continue  # it was in a step that raised, so it must run alone
            if self._yields and request.tier == BEST_EFFORT:
                continue
            start = request.computed
            if decision.separate and spans and bool(chunks) == (request.generated > 0 and request.remaining == 1):
                continue  # the step already contains the other kind
            if request.on_device and start < request.sent_pages * size and wanted == 0 < tokens:
                decode += 1
                context += start
                if start > longest:
                    longest = start
                spans.append(self._again(request, start))
                budget -= 1
                if request.failures:
                    break
                continue
            decodes = request.generated > 0 and request.remaining == 1
            if not decodes and prompts == 0:
                continue
            if request.state is State.WAITING and not (self._admitting and self._admit(request)):
                continue
            start = request.computed
            draft = self._draft(request, wanted, budget) if decodes else 0
            room = budget - draft if decodes or request.tier == BEST_EFFORT else max(1, budget - kept)
            length = min(tokens, request.remaining, room) + draft
            length = length if decodes else self._stoppable(start, length, decode)
            if length <= draft or not self._room(request, start + length, decision, position):
                continue
            if decodes:
                decode += length
                context += start
                longest = max(longest, start)
                drafts = max(drafts, draft)
            else:
                chunks.append((len(spans), request, Chunk(start, length, request.remaining)))
                prompts -= 1
            spans.append(self._span(request, length, draft))
            budget -= length
            if request.failures:
                break
        load = Load(decode=decode, longest=longest, context=context, drafts=drafts)
        load = self._fit(load, chunks, spans)
        self._queues.step(self._stepped)
        return BuiltStep(tuple(spans), load, tuple(self._admitted), tuple(self._dropped))

    def _stoppable(self, start: int, length: int, decode: int) -> int:
        """Return how many of a chunk's tokens can join a step that stops within `Limits.stop_within`.

        The first chunk has a few at least. A step with decodes is never stopped.
        """
        limits, before = self._limits, self._prompts
        if decode or not limits.preemptible or self._seconds is None or limits.stop_within is None:
            return length
        longest = (limits.stop_within - LEAD) / limits.stopping
        fits = largest_chunk(self._seconds, before, start, length, longest)
        if not fits and not before.tokens:
            fits = min(length, GRID)
        self._prompts = before.add_chunk(fits, start)
        return fits

    def _fit(self, load: Load, chunks: list[tuple[int, Request, Chunk]], spans: list[Span]) -> Load:
        """Fit the prompt chunks to the padded sizes; every prompt already has all its pages.

        load: that of the decodes. Returns the load with the chunks.
        """
        given = [chunk for _, _, chunk in chunks]
        lengths = [chunk.length for chunk in given]
        if given and self._seconds is not None:
            lengths = fitted(load, given, self._limits.stairs, self._limits.tokens, self._seconds)
        for (at, request, chunk), length in zip(chunks, lengths, strict=True):
            if length != chunk.length:
                spans[at] = self._refit(spans[at], request, length)
            load = load.add_chunk(length, chunk.start)
        return load

    def _refit(self, span: Span, request: Request, length: int) -> Span:
        """Take a prompt's span back and return one of another length."""
        request.computed = span.start
        request.sent_pages -= len(span.new_pages)
        request.inflight -= 1
        if span.samples:
            request.pending -= 1
            request.budget -= request.tpot
            request.on_device = False
        return self._span(request, length, 0)

    def _check_displaced(self, id: int) -> None:
        """Raise PolicyError unless a demotion or preemption of this step has displaced a request from the view."""
        if id not in self._queues.room:
            raise PolicyError(f"the policy granted request {id}, which is not in its view")

    def _best_effort_last(self, decision: Decision) -> tuple[Decision, int]:
        """Move grants of best effort to the end, whatever the order of the policy.

        A request with a span in this step could no longer give its pages to requests named after
        it. Also returns how many tokens prompts must leave to best-effort decodes, which would
        otherwise starve behind long prompts.
        """
        tables = (self._queues.prefill, self._queues.decode)
        if not any(len(table) and table[-1].tier == BEST_EFFORT for table in tables):
            return decision, 0  # best effort is at the end of each queue
        filed, requests = self._queues.runnable, self._queues.requests
        last = [filed(grant.request) and requests[grant.request].tier == BEST_EFFORT for grant in decision.grants]
        order = sorted(range(len(last)), key=last.__getitem__)
        behind = [requests[grant.request] for grant, late in zip(decision.grants, last, strict=True) if late]
        kept = 0 if decision.separate else sum(request.generated > 0 and request.remaining == 1 for request in behind)
        return replace(decision, grants=tuple(decision.grants[index] for index in order)), kept

    def _draft(self, request: Request, wanted: int, budget: int) -> int:
        """Return how many tokens to draft.

        A draft is a guess: it takes no page that a running decode may need, and leaves budget for
        the token of the request itself.
        """
        if not request.drafts or request.slow:
            return 0
        draft = min(wanted, self._limits.draft, request.limit - request.generated - 1, budget - 1)
        blocks = self._kv.blocks
        fresh = blocks.count(request.computed + 1 + draft) - len(request.pages)
        return draft if draft > 0 and (fresh <= 0 or fresh + len(self._queues.decode) <= blocks.available) else 0

    def _admit(self, request: Request) -> bool:
        """Admit a waiting request if it fits. Returns whether it does.

        The first request that does not fit ends admission, because smaller ones behind it would
        starve it.
        """
        queues = self._queues
        while self._admitting and not self._kv.admit(request, len(queues.decode)):
            self._admitting = request.tier != BEST_EFFORT and self._evict_best_effort()
            self._yields |= self._busy and request.tier != BEST_EFFORT and not self._admitting
        if self._admitting:
            request.state = State.RUNNING
            queues.file(request)
            self._admitted.append(request)
        return self._admitting

    def _room(self, request: Request, tokens: int, decision: Decision, position: int) -> bool:
        """Allocate pages for `tokens` tokens. Returns whether they fit.

        If no page is left, takes pages from the requests at the end of the decision.
        """
        while not self._kv.grow(request, tokens):
            if request.tier != BEST_EFFORT and self._evict_best_effort():
                continue
            if self._busy:
                self._yields |= request.tier != BEST_EFFORT
                return False  # a victim may be in the running step; the next plan tries again
            victim = next(self._victims(decision, position), None)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _drop(self, victim: Request) -> None:
        drop(victim, self._queues, self._kv)
        self._dropped.append(victim)

    def _evict_best_effort(self) -> bool:
        """Drop the KV of the last best-effort request. Returns False if there is none to drop."""
        victim = evict_best_effort(self._queues, self._kv)
        if victim is not None:
            self._dropped.append(victim)
        return victim is not None

    def _victims(self, decision: Decision, position: int) -> Iterator[Request]:
        """Yield running requests that rank behind `position`: first those without a grant, then the last grants.

        Best effort takes pages from best effort only.
        """
        tier = self._queues.requests[decision.grants[position].request].tier
        for request in self._behind(decision, position):
            if request.state is State.RUNNING and (tier != BEST_EFFORT or request.tier == BEST_EFFORT):
                yield request

    def _behind(self, decision: Decision, position: int) -> Iterator[Request]:
        named = {grant.request for grant in decision.grants}
        for table in (self._queues.prefill, self._queues.decode):
            for row in range(len(table) - 1, -1, -1):
                if table[row].id not in named:
                    yield table[row]
        for grant in decision.grants[:position:-1]:
            yield self._queues.requests[grant.request]

    def _again(self, request: Request, start: int) -> Span:
        """Return the span of a request that decodes again, into a page its slot knows. Faster than `_span`."""
        request.computed = start + 1
        request.inflight += 1
        request.pending += 1
        request.budget += request.tpot
        if len(request.output) + request.pending < request.limit and not request.slow:
            self._stepped.append(request)
        else:
            request.held = request.slow
            self._queues.unfile(request)
        slot = request.slot
        assert slot is not None
        return decoding(request.id, slot, start)

    def _step(self, request: Request) -> None:
        """Update the queues for a request that decodes on, or has all its tokens planned."""
        if len(request.output) + request.pending < request.limit and not request.held:
            self._stepped.append(request)
        else:
            self._queues.unfile(request)

    def _span(self, request: Request, length: int, draft: int) -> Span:
        """Advance the cursor and return the span."""
        start, pages, sent = request.computed, request.pages, request.sent_pages
        samples = length - draft == request.remaining
        assert request.slot is not None
        span = Span(
            request.id,
            request.slot,
            start,
            length,
            tuple(pages[sent:]) if len(pages) > sent else (),
            () if request.on_device and length == 1 + draft else request.tokens(start, start + length - draft),
            draft,
            samples,
            None if sent else begin(request, history=self._limits.history),
        )
        request.sent_pages = len(pages)
        request.computed = start + length
        request.inflight += 1
        if samples:
            request.pending += 1 + draft
            request.drafting = draft
            request.held = request.slow
            request.budget += (1 + draft) * request.tpot
            if request.on_device and not draft:  # it decodes, as in the step before
                self._step(request)
                return span
            request.on_device = True
        if request.scheduled_at is None:
            request.scheduled_at = self._start
        self._queues.file(request)
        return span


def drop(victim: Request, queues: RequestQueues, memory: KVManager) -> None:
    """Drop the KV of a request. Its tokens are kept."""
    memory.vacate(victim)
    victim.drops += 1
    victim.state = State.WAITING
    queues.file(victim)


def evict_best_effort(queues: RequestQueues, memory: KVManager) -> Request | None:
    """Drop the KV of the last best-effort request that is in no submitted step. Returns None if there is none."""
    for table in (queues.decode, queues.prefill):
        for row in range(len(table) - 1, -1, -1):
            request = table[row]
            if request.tier != BEST_EFFORT:
                break  # best effort is at the end of the queue
            if request.state is State.RUNNING and not request.inflight:
                drop(request, queues, memory)
                return request
    return None


def reserve(request: Request, queues: RequestQueues, memory: KVManager, coming: int) -> tuple[Reservation | None, int]:
    """Reserve pages and a slot for a request that arrives from elsewhere, beside `coming` others.

    Also returns how many best-effort requests lost their KV for it.
    """
    dropped = 0
    while (reservation := memory.reserve(request, len(queues.decode) + coming)) is None:
        if request.tier == BEST_EFFORT or evict_best_effort(queues, memory) is None:
            break
        dropped += 1
    return reservation, dropped


def begin(request: Request, *, history: bool = False) -> Begin:
    """Return what the executor needs before the first span of a request.

    It includes tokens only if penalties, scores, drafts, structured outputs or filtered tokens need them.
    """
    params = request.params
    penalized = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    history = history or penalized or params.constrained or params.prompt_logprobs is not None
    return Begin(
        params,
        request.seed,
        tuple(request.prompt) if history else (),
        tuple(request.output) if history else (),
        request.prompt_length,
        tuple(sorted(request.eos)),
    )
