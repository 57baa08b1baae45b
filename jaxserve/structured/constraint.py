"""The constraint of one request while it runs: which tokens may come next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from math import inf
from time import perf_counter, thread_time

import numpy as np
from llguidance import LLMatcher

from jaxserve.errors import JaxserveError
from jaxserve.sched.api.thinking import ThinkingEnd, ThinkingMarkers
from jaxserve.structured.token_filter import TokenFilter, Words, bit

SLOW = 0.005  # CPU seconds of a mask, on average: a request whose masks take longer ends
LATE = 0.0005  # likewise: masks that take longer are made between steps, so that no other row waits for them
REMEMBERED = 16  # masks of which the average is, about


class Constraint:
    """What an output must match, and how far it has come.

    It has a matcher of its text, a filter of its tokens, or both.

    Writer of `known` and of the tokens told: the event loop. Of all else: the thread that makes masks.
    Thinking is free: the constraint begins with the answer. If the model may begin to think, it may also
    begin with the answer.
    """

    def __init__(
        self,
        make: Callable[[], LLMatcher] | None,
        *,
        prompt: Sequence[int],
        output: Sequence[int],
        ends: Sequence[int] = (),
        least: int = 0,
        markers: ThinkingMarkers | None = None,
        tokens: TokenFilter | None = None,
    ) -> None:
        """make: returns a matcher at the beginning of an output; called by `advance`. output: tokens so far.

        ends: ids that may not be sampled before `least` tokens, unless nothing else is allowed. tokens: holds
        also for thinking.
        """
        self.known = len(output)  # tokens of the output that were told
        self.error: str | None = None  # why it cannot go on
        self.seconds = inf if make is not None else 0.0  # that its last mask took; inf if a matcher has made none
        self._average = 0.0  # CPU seconds of its last masks that were made alone
        self._next: tuple[int, Words] | None = None  # a mask that was made ahead, and the length that it is for
        self._told: deque[int] = deque(output)
        self._make = make
        self._matcher: LLMatcher | None = None
        self._filter = tokens
        self._tail: tuple[int, ...] = ()  # the last tokens, of which the filter needs some
        self._length = 0  # tokens of the output that the matcher has seen
        self._ends = tuple(ends)
        self._least = least
        self._thinking: ThinkingEnd | None = None
        self._starts: tuple[int, ...] = ()  # tokens with which the output may begin to think
        self._header: int | None = None  # the token that ends the header of the answer, while that is written
        self._markers = markers if make is not None and markers is not None and markers.closes else None
        if self._markers is not None and self._markers.asked(prompt):
            self._begin(self._markers, prompt)

    def _begin(self, markers: ThinkingMarkers, prompt: Sequence[int]) -> None:
        at = markers.last(prompt)
        if at in markers.starts:
            self._thinking = markers.after(prompt)
        elif at in markers.closes:
            self._header = markers.header_end if prompt[-1] != markers.header_end else None
        elif at is not None:
            self._starts = tuple(sorted({start[0] for start in markers.starts}))

    def tell(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the output."""
        self._told.extend(tokens)
        self.known += len(tokens)

    def advance(self) -> LLMatcher | None:
        """Follow the tokens told. Returns the matcher that makes the next mask; None: every token may come."""
        if self._make is not None and self._matcher is None and self.error is None:
            try:
                self._matcher = self._make()
            except JaxserveError as error:
                self.error = str(error)
        while self._told:
            self._accept(self._told.popleft())
        free = self._thinking is not None or self._header is not None or self.error is not None
        return None if free else self._matcher

    def forced(self, most: int) -> list[int]:
        """Return the next tokens, at most `most`, if the constraint allows no others."""
        matcher = self.advance()
        if matcher is None or self._length == 0 or matcher.is_stopped():
            return []
        return list(matcher.compute_ff_tokens())[:most]

    def _accept(self, token: int) -> None:
        self._length += 1
        if self._filter is not None and self._filter.reach:
            self._tail = (*self._tail, token)[-self._filter.reach :]
        if self._thinking is not None:
            if self._thinking.feed(token):
                self._thinking = None
                self._header = self._markers.header_end if self._markers is not None else None
        elif self._header is not None:
            self._header = None if token == self._header else self._header
        elif self._length == 1 and token in self._starts:
            assert self._markers is not None
            self._thinking = ThinkingEnd(self._markers.closes)
            self._thinking.feed(token)
        elif self.error is None and not self._consumes(token):
            self._fail()

    def _consumes(self, token: int) -> bool:
        """Consume a token; return whether the matcher allows it. After the end of the text it takes any."""
        matcher = self._matcher
        return matcher is None or matcher.is_stopped() or matcher.consume_token(token)

    def _fail(self) -> None:
        assert self._matcher is not None
        self.error = f"the output cannot be constrained any further: {self._matcher.get_error()[:200]}"

    def finish(self, mask: Words, matched: bool = True) -> None:
        """Complete a mask [W]. matched: the matcher of `advance` has made it; otherwise it allows every token.

        After an error every token may come, and the request ends.
        """
        if matched:
            assert self._matcher is not None
            if self._matcher.is_error():
                self._fail()
                mask[:] = -1
                return
        if self._filter is not None and self.error is None and not self._filter.apply(mask, self._tail):
            self.error = "no token is left to sample after allowed_token_ids and bad_words"
            mask[:] = -1
            return
        if self._length < self._least and (matched or self._make is None):
            banned = mask.copy()
            for token in self._ends:
                banned[token // 32] &= ~bit(token)
            if banned.any():
                mask[:] = banned
        if matched and self._length == 0 and self._starts:
            starts = np.zeros_like(mask)
            for token in self._starts:
                starts[token // 32] |= bit(token)
            if self._filter is not None:
                self._filter.apply(starts, self._tail)
            mask |= starts

    @property
    def late(self) -> bool:
        """Whether its masks take so long that they are made between steps, by `prepare`."""
        return self._average > LATE

    @property
    def prepared(self) -> bool:
        """Whether the next mask is made, so that `fill` takes no time."""
        return self._next is not None and not self._told and self._next[0] == self._length

    def prepare(self, width: int) -> None:
        """Make the next mask [W] ahead, for the next `fill`."""
        mask = np.empty(width, np.int32)
        self.fill(mask)
        self._next = self._length, mask

    def fill(self, mask: Words) -> None:
        """Write the mask [W] of the next token. A constraint whose masks are slow on average is an error."""
        if self.prepared and self._next is not None:
            mask[:] = self._next[1]
            return
        mask[:] = -1
        began, matcher = perf_counter(), self.advance()
        if matcher is not None:
            burned = thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._average += (thread_time() - burned - self._average) / REMEMBERED
        self.finish(mask, matched=matcher is not None)
        self.seconds = perf_counter() - began
        if self._average > SLOW and self.error is None:
            self.error = f"structured outputs take {self._average * 1e3:.0f} ms for each token: simplify them"

    def fill_ahead(self, masks: Words, draft: Sequence[int]) -> None:
        """Write the masks [1 + D, W] of the next token, and of the one after each of `draft` [D].

        Masks after a drafted token that is not allowed do not matter, because it is not accepted.
        """
        masks[:] = -1
        self.advance()
        ahead = self._copied()
        for at, mask in enumerate(masks[: len(draft) + 1]):
            ahead.fill(mask)
            if at == len(draft):
                break
            token = draft[at]
            if not (0 <= token < 32 * len(mask) and mask[token // 32] & bit(token)):
                break
            ahead.tell((token,))
        self._average = ahead._average
        if ahead.error is not None and self.error is None and (not at or self._average > SLOW):
            self.error = ahead.error

    def _copied(self) -> Constraint:
        copied: Constraint = copy(self)
        copied._told = deque()
        if self._matcher is not None:
            copied._matcher = self._matcher.deep_copy()
        if self._thinking is not None:
            copied._thinking = ThinkingEnd(self._thinking.markers, self._thinking.seen)
        return copied
