"""Pages that may hold NaN: their KV was computed or received, and no finite token was sampled from it yet.

0 * NaN is NaN, so a row that masks such a page without having written it is not isolated from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.engine.programs.inputs import SlotTable
from jaxserve.sched.api.plan import Span, StepResult


class Doubts:
    """The doubtful pages of a pool. Writer: the executor that owns it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.pages: set[int] = set()
        self._slots: set[int] = set()  # slots that may hold such pages

    def clear(self) -> None:
        """Forget all pages: the pool is new."""
        self.pages.clear()
        self._slots.clear()

    def add(self, pages: Iterable[int]) -> None:
        """Doubt pages whose KV was received."""
        self.pages.update(pages)

    def reuse(self, span: Span, slots: SlotTable) -> list[int]:
        """Return the new pages of a span that must be zeroed before it runs; `slots` does not hold them yet."""
        if not self.pages:
            return []
        written = max(0, -(-span.start // self._page_size) - len(slots.held(span.slot)))
        dirty = self.pages.intersection(span.new_pages[written:])
        self.pages -= dirty
        if not self.pages.isdisjoint(span.new_pages[:written]):
            self._slots.add(span.slot)
        return sorted(dirty)

    def write(self, span: Span, slots: SlotTable) -> None:
        """Doubt the pages of a chunk that samples nothing: NaN in them would go unnoticed."""
        size = self._page_size
        self.pages.update(slots.held(span.slot)[span.start // size : (span.start + span.length - 1) // size + 1])
        self._slots.add(span.slot)

    def settle(self, spans: Sequence[Span], result: StepResult, slots: SlotTable) -> None:
        """Doubt the pages of spans that failed, and trust those from which a finite token was sampled."""
        for index in result.failed:
            self.pages.update(slots.held(spans[index].slot))
        if not self._slots:
            return
        for index, span in enumerate(spans):
            if span.slot in self._slots and span.samples and index not in result.failed:
                self._slots.discard(span.slot)
                self.pages.difference_update(slots.held(span.slot))
