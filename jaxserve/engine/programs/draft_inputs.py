"""The inputs of a step that drafts, beyond those of its plan.

Numpy only; runs on the engine's thread. Letters: S rows that draft, P pages per row, G sampling
rows, D tokens of a row that are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.engine.programs.sampling import Column
from jaxserve.sched.api.errors import InvalidValue

Int32 = npt.NDArray[np.int32]


class DraftColumn(IntEnum):
    """The columns of a drafting row; its block table follows them."""

    SLOT = 0  # out of range for padding
    START = 1  # position of the row's last token
    COUNT = 2  # tokens to draft


class Drafts(NamedTuple):
    """The drafting and verification inputs of a step."""

    depth: int  # D - 1, of the programs
    rows: Int32  # [S, len(DraftColumn) + P], rows that draft, longest drafts first
    drawn: Int32  # [S, len(Column)], their sampling parameters; POSITION of the first drafted token
    places: Int32  # [G * D] index of the hidden state from which each token is sampled
    lengths: Int32  # [G] drafted tokens of each row
    sampling: Int32  # [G, len(Column)], of all rows except those sampled alone


class DraftRows(NamedTuple):
    """The rows of a step as numpy columns, one entry per row."""

    slots: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    lengths: npt.NDArray[Any]  # drafted tokens
    ends: npt.NDArray[Any]  # ends of their spans in the step's tokens
    alone: npt.NDArray[np.bool_]  # sampled by `draw_full`, one token per step


def drafts_of(
    rows: DraftRows, *, depth: int, ladder: Sequence[int], sampling: Int32, tables: Int32, slots: int
) -> Drafts:
    """Build the drafting inputs of a step.

    sampling: [G, len(Column)] of all rows. tables: [rows, P]. ladder: the numbers of rows that
    drafters have programs for. slots: the number of slots, which is the id of no slot.

    Raises InvalidValue if a row drafts that must be sampled alone.
    """
    if wrong := rows.slots[rows.alone & (rows.lengths > 0)].tolist():
        raise InvalidValue(f"slots {wrong} draft, but their sampling parameters allow one token per step only")
    count, width = len(rows.slots), len(sampling)
    sampled, lengths = sampling.copy(), np.zeros(width, np.int32)
    sampled[:count, Column.POSITION] -= rows.lengths.astype(np.int32)
    sampled[:count, Column.SLOT][rows.alone] = slots
    lengths[:count] = rows.lengths
    index = np.zeros((width, 1 + depth), np.int32)
    ahead = np.minimum(np.arange(1 + depth), rows.lengths[:, None])
    index[:count] = (rows.ends - 1 - rows.lengths)[:, None] + ahead
    drafting = np.argsort(-rows.lengths, kind="stable")[: int(np.count_nonzero(rows.lengths))]
    size = next(size for size in ladder if size >= len(drafting))
    told = idle_rows(size, tables.shape[1], slots)
    told[: len(drafting), DraftColumn.SLOT] = rows.slots[drafting]
    told[: len(drafting), DraftColumn.START] = rows.starts[drafting]
    told[: len(drafting), DraftColumn.COUNT] = rows.lengths[drafting]
    told[: len(drafting), len(DraftColumn) :] = tables[drafting]
    drawn = np.repeat(sampled[drafting[:1]], size, axis=0)
    drawn[: len(drafting)] = sampled[drafting]
    return Drafts(depth, told, drawn, index.reshape(-1), lengths, sampled)


def idle_rows(size: int, row_pages: int, slots: int) -> Int32:
    """Return `Drafts.rows` of padding."""
    told = np.zeros((size, len(DraftColumn) + row_pages), np.int32)
    told[:, DraftColumn.SLOT] = slots
    return told


def idle_drafts(depth: int, size: int, row_pages: int, sampling: Int32, slots: int) -> Drafts:
    """Return inputs that draft and sample nothing. sampling: [G, len(Column)] of padding."""
    width = len(sampling)
    return Drafts(
        depth,
        idle_rows(size, row_pages, slots),
        np.repeat(sampling[:1], size, axis=0),
        np.zeros(width * (1 + depth), np.int32),
        np.zeros(width, np.int32),
        sampling,
    )
