"""Groups of spans that read a common prefix together (cascade attention).

Requests share pages through the prefix cache. A group is a set of spans whose block tables begin
with the same pages, all of them full before the step. Each span is in at most one group, and the
groups are chosen to save many page reads: a group of n spans with p pages saves (n - 1) * p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..api.plan import LEAST_SHARING, SharedPrefix, Span

LEAST_TOKENS = 256  # shorter prefixes cost more to merge than to read again, as in vLLM's rule
Ints = np.ndarray[Any, np.dtype[np.int64]]


class Group(NamedTuple):
    """Spans by their index in the step, and how many leading pages they share."""

    spans: tuple[int, ...]
    pages: int


class PrefixGroups:
    """The pages with which the request of each slot began. Writer: the Scheduler of the instance."""

    def __init__(self, slots: int, page_size: int) -> None:
        self._size = page_size
        self._tables = np.zeros((slots, 1), np.int64)  # [slots, pages]
        self._known = np.zeros(slots, np.int64)  # pages of each slot in the table
        self._prompts = np.zeros(slots, np.int64)  # prompt length of the request in each slot

    def groups(self, spans: Sequence[Span]) -> tuple[SharedPrefix, ...]:
        """Return the groups of a step. Must be given every step, since spans bring the pages."""
        for span in spans:
            if span.begin is not None:
                self._prompts[span.slot] = span.begin.prompt_length
                self._begin(span.slot, span.new_pages)
        if len(spans) < LEAST_SHARING:
            return ()
        slots = np.array([span.slot for span in spans])
        starts = np.array([span.start for span in spans])
        # Pages that a request adds later are its own: no prompt that runs beside it can contain its output.
        full = np.minimum(starts // self._size, self._known[slots])
        groups = grouped(self._tables, slots, full, -(-LEAST_TOKENS // self._size))
        return tuple(
            SharedPrefix(*group, sum(self._decodes(spans[index]) for index in group.spans)) for group in groups
        )

    def _decodes(self, span: Span) -> bool:
        return span.length == 1 + span.draft and span.start >= int(self._prompts[span.slot])

    def _begin(self, slot: int, pages: Sequence[int]) -> None:
        if len(pages) > self._tables.shape[1]:
            more = max(len(pages), 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, more)))
        self._tables[slot, : len(pages)] = pages
        self._known[slot] = len(pages)


def grouped(tables: Ints, slots: Ints, full: Ints, least_pages: int) -> list[Group]:
    """Choose groups of rows with a common prefix of at least `least_pages` pages.

    tables [slots, P]: pages of each slot. slots [S]: those of the rows. full [S]: how many leading
    pages of each row may be shared.
    """
    groups: list[Group] = []
    for part in _parts(tables, slots, np.flatnonzero(full), 0)[0]:
        groups += _best(tables, slots, full, part, 1, least_pages)[1]
    return sorted(groups)


def _best(tables: Ints, slots: Ints, full: Ints, rows: Ints, depth: int, least_pages: int) -> tuple[int, list[Group]]:
    """Return the saved page reads and the groups of rows that share their first `depth` pages.

    The rows share `run` pages. Where they part, each branch either forms groups with the longer
    prefixes that its own rows share, or joins the group of all that share `run` pages, whichever
    saves more; or all of them stay together, if too few rows would remain for the joint group.
    """
    ends = int(full[rows].min())
    same = (tables[slots[rows], depth:ends] == tables[slots[rows[0]], depth:ends]).all(axis=0)
    run = depth + (len(same) if same.all() else int(same.argmin()))
    each = run if run >= least_pages else 0  # saved by a row that joins
    parts, others = _parts(tables, slots, rows[full[rows] > run], run)
    saved, apart, joined = 0, list[Group](), [*rows[full[rows] <= run].tolist(), *others]
    for part in parts:
        more, branch = _best(tables, slots, full, part, run + 1, least_pages)
        if more > each * len(part):
            saved, apart = saved + more, apart + branch
        else:
            joined += part.tolist()
    if each and len(joined) >= LEAST_SHARING:
        saved, apart = saved + each * (len(joined) - 1), [*apart, Group(tuple(sorted(joined)), run)]
    whole = each * (len(rows) - 1)
    return (saved, apart) if saved > whole else (whole, [Group(tuple(rows.tolist()), run)] if each else [])


def _parts(tables: Ints, slots: Ints, rows: Ints, column: int) -> tuple[list[Ints], list[int]]:
    """Split rows by their page in a column; return the parts that can be groups, and the rows of the others."""
    pages = tables[slots[rows], column] if len(rows) else rows
    order = np.argsort(pages, kind="stable")
    ordered = rows[order]
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(pages[order])) + 1, [len(rows)]])
    sizes = np.diff(bounds)
    parts = [ordered[bounds[at] : bounds[at + 1]] for at in np.flatnonzero(sizes >= LEAST_SHARING)]
    return parts, ordered[np.repeat(sizes < LEAST_SHARING, sizes)].tolist()
