"""The masks of a step: which tokens each row with structured outputs or filtered tokens may sample.

A step is planned before the tokens of the step ahead are known, and a mask depends on them. So the
model's part of a step is dispatched at once, and its sampling when the masks are made, in a thread,
while the devices still compute. A row whose masks take long is held: it is in no step until its next
mask is made, in another thread, so that the other rows of a step never wait for it.

Letters: G sampling rows, D tokens of a row that are verified, W words of a mask.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor

from jaxserve.engine.programs.inputs import Batch, Limits, banned
from jaxserve.engine.programs.sampling import Column
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.plan import Begin, Span, StepResult
from jaxserve.sched.api.thinking import ThinkingMarkers
from jaxserve.structured.compiler import Compiler
from jaxserve.structured.constraint import LATE, Constraint
from jaxserve.structured.token_filter import TokenFilter, Words, words

SHORT = 2e-4  # seconds
SUSPECT = LATE  # seconds of a mask; the next one is made alone, so that its cost is known


class Masks(NamedTuple):
    """The masks of a step."""

    rows: Words | None  # [G, W], of rows that sample one token; None: none of them is constrained
    ahead: Words | None  # [G * D, W], of rows that may draft; likewise
    ended: Mapping[int, str]  # span index -> why its request cannot go on


class Masker:
    """The constraints of an instance's slots. Writer: its executor, on the event loop."""

    def __init__(self, name: str, limits: Limits, compiler: Compiler | None, markers: ThinkingMarkers | None) -> None:
        """compiler: None: requests with structured outputs are refused. markers: of the model's thinking."""
        self._words = words(limits.vocab)
        self._vocab = limits.vocab
        self._draft = limits.draft
        self._compiler = compiler
        self._markers = markers
        self._slots: dict[int, tuple[Constraint, int]] = {}  # with the length of the prompt
        self._failed: set[int] = set()  # slots whose request got no token; steps ahead may sample any token for it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"jaxserve-{name}-masks")  # one: matchers have no locks
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix=f"jaxserve-{name}-slow-masks")  # of rows in no step
        self._preparing: dict[int, asyncio.Future[None]] = {}  # by slot
        self._parallel: LLExecutor | None = None

    def begin(self, slot: int, begin: Begin) -> None:
        """Start a request in a slot. Raises InvalidValue if structured outputs are not supported."""
        self.release([slot])
        if not begin.params.constrained:
            return
        wanted, compiler = begin.params.structured_outputs, self._compiler
        if wanted is not None and compiler is None:
            raise InvalidValue("this executor has no tokenizer for structured outputs", "structured_outputs")
        constraint = Constraint(
            None if wanted is None or compiler is None else lambda: compiler.matcher(wanted),
            prompt=begin.prompt,
            output=begin.output,
            ends=banned(begin.params, begin.eos),
            least=begin.params.min_tokens,
            markers=self._markers,
            tokens=TokenFilter.of(begin.params, self._vocab),
        )
        self._slots[slot] = constraint, begin.prompt_length

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)
            if (preparing := self._preparing.pop(slot, None)) is not None:
                preparing.cancel()
        self._failed.difference_update(slots)

    def clear(self) -> None:
        """Forget all requests."""
        self.release(tuple(self._slots))
        self._failed.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        self._ahead.shutdown(wait=False)

    def constrained(self, spans: Sequence[Span]) -> tuple[int, ...]:
        """Return the indices of the spans that sample and have a constraint."""
        slots = self._slots
        return tuple(at for at, span in enumerate(spans) if span.samples and span.slot in slots) if slots else ()

    def ready(self, batch: Batch, spans: Sequence[Span]) -> bool:
        """Return whether all tokens before those that a step samples are known."""
        for _, span, constraint in self._mine(batch, spans):
            prompt = self._slots[span.slot][1]
            if constraint.known < span.start + span.length - span.draft - prompt:
                return False
        return True

    def tell(self, batch: Batch, spans: Sequence[Span], result: StepResult) -> frozenset[int]:
        """Record the tokens that a step has sampled, and which rows got none: no other will follow.

        Returns the indices of the rows that are held until their next mask is made.
        """
        held = []
        for at in batch.constrained:
            slot = spans[at].slot
            if slot not in self._slots:
                continue
            if at in result.failed or at in result.ended:
                self._failed.add(slot)
            constraint = self._slots[slot][0]
            constraint.tell(result.tokens[at])
            if constraint.late:
                held.append(at)
        return frozenset(held)

    def prepare(self, slot: int) -> asyncio.Future[None]:
        """Make the next mask of a held row in a thread of its own. Returns when it is made; see `Executor.unheld`."""
        constraint = self._slots[slot][0]
        masks = asyncio.wrap_future(self._ahead.submit(constraint.prepare, self._words))
        self._preparing[slot] = masks
        return masks

    def forced(self, batch: Batch, spans: Sequence[Span]) -> Words | None:
        """Return tokens [G, K] that replace drafted ones, because constraints allow no others; -1: none.

        None if nothing is forced, or the tokens before are not known yet. No masks may be in the making.
        """
        if batch.drafts is None or not self.ready(batch, spans):
            return None
        forced = np.full((batch.bucket.width, self._draft), -1, np.int32)
        for at, span, constraint in self._mine(batch, spans):
            if span.draft and verified(batch, at, span):
                tokens = constraint.forced(span.draft)
                forced[at, : len(tokens)] = tokens
        return forced if (forced >= 0).any() else None

    def at_once(self, batch: Batch, spans: Sequence[Span]) -> Masks | None:
        """Return the masks of a step if they take less time than to hand them to another thread, else None."""
        mine = self._mine(batch, spans)
        seconds = sum(0.0 if constraint.prepared else constraint.seconds for _, _, constraint in mine)
        if batch.drafts is not None or seconds > SHORT:
            return None
        rows = np.full((batch.bucket.width, self._words), -1, np.int32)
        for at, _, constraint in mine:
            constraint.fill(rows[at])
        return Masks(rows, None, _ended(mine))

    def make(self, batch: Batch, spans: Sequence[Span], drafted: object | None) -> Future[Masks]:
        """Make the masks of a step in a thread. drafted: tokens [G, K], of rows that draft; read there."""
        return self._thread.submit(self._make, batch, self._mine(batch, spans), drafted)

    def _mine(self, batch: Batch, spans: Sequence[Span]) -> list[tuple[int, Span, Constraint]]:
        """Return the constrained rows of a step, without those whose request got no token."""
        rows = ((at, spans[at]) for at in batch.constrained if spans[at].slot not in self._failed)
        return [(at, span, self._slots[span.slot][0]) for at, span in rows]

    def _make(self, batch: Batch, mine: list[tuple[int, Span, Constraint]], drafted: object | None) -> Masks:
        if self._parallel is None:
            self._parallel = LLExecutor()
        ahead = self._verifying(batch, mine, drafted)
        several = set() if ahead is None else {at for at, span, _ in mine if verified(batch, at, span)}
        rows, waiting = None, []
        single = [(at, constraint) for at, _, constraint in mine if at not in several]
        if single:
            rows = np.full((batch.bucket.width, self._words), -1, np.int32)
            for at, constraint in single:
                if constraint.prepared or SUSPECT < constraint.seconds < inf:
                    constraint.fill(rows[at])
                elif (matcher := constraint.advance()) is not None:
                    waiting.append((at, constraint, matcher))
                else:
                    constraint.finish(rows[at], matched=False)
        if rows is not None and waiting:
            size = rows.strides[0]
            given, began = [(matcher, at) for at, _, matcher in waiting], perf_counter()
            self._parallel.unsafe_compute_mask_ptr(given, rows.ctypes.data, size, len(rows))
            each = (perf_counter() - began) / len(waiting)
            for at, constraint, _ in waiting:
                constraint.finish(rows[at])
                constraint.seconds = each
        return Masks(rows, ahead, _ended(mine))

    def _verifying(
        self, batch: Batch, mine: list[tuple[int, Span, Constraint]], drafted: object | None
    ) -> Words | None:
        """Return the masks of the rows that may draft."""
        if batch.drafts is None or not any(verified(batch, at, span) for at, span, _ in mine):
            return None
        tokens, depth = np.asarray(drafted), 1 + batch.drafts.depth
        masks = np.full((batch.bucket.width, depth, self._words), -1, np.int32)
        for at, span, constraint in mine:
            if verified(batch, at, span):
                constraint.fill_ahead(masks[at], tokens[at, : span.draft].tolist())
        return masks.reshape(-1, self._words)


class StepMasks:
    """The masks of one step, made once. Writer: the executor of the step, on the event loop."""

    __slots__ = ("_batch", "_begun", "_masker", "_spans", "made")

    def __init__(self, masker: Masker, batch: Batch, spans: Sequence[Span]) -> None:
        self.made: Masks | None = None
        self._begun = False
        self._masker = masker
        self._batch = batch
        self._spans = spans

    def make(
        self, drafted: object | None, loop: AbstractEventLoop, on_made: Callable[[BaseException | None], None]
    ) -> None:
        """Make the masks if the tokens before them are known and nothing has begun to; sets `made`, now or later.

        drafted: see `Masker.make`. on_made: called on the loop when masks that take a thread are made, with
        the error if they could not be.
        """
        if self._begun or not self._masker.ready(self._batch, self._spans):
            return
        self._begun = True
        self.made = self._masker.at_once(self._batch, self._spans)
        if self.made is not None:
            return

        def arrived(masks: Future[Masks]) -> None:
            if (error := masks.exception()) is None:
                self.made = masks.result()
            on_made(error)

        def done(masks: Future[Masks]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrived, masks)

        self._masker.make(self._batch, self._spans, drafted).add_done_callback(done)


def _ended(mine: list[tuple[int, Span, Constraint]]) -> dict[int, str]:
    return {at: constraint.error for at, _, constraint in mine if constraint.error is not None}


def verified(batch: Batch, at: int, span: Span) -> bool:
    """Return whether a span's tokens are verified in a step, also if it has no draft."""
    return batch.drafts is not None and bool(batch.drafts.sampling[at, Column.SLOT] == span.slot)
