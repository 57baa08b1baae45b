"""The drafter protocol, and the n-gram drafter, which needs no model.

A drafter fills the carry's columns after the last token, on the device, from state on the device;
the host only supplies rows, positions and lengths. Letters: S rows that draft, P pages per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.programs.draft_inputs import DraftColumn, Drafts, Int32, idle_rows
from jaxserve.engine.programs.inputs import Batch, Limits
from jaxserve.engine.programs.program import Program
from jaxserve.engine.programs.speculate import ngram
from jaxserve.engine.programs.step import Carry
from jaxserve.sched.api.plan import Span


class Call(NamedTuple):
    """A program with arguments as when serving."""

    label: str
    program: Program
    args: tuple[Any, ...]


class Drafter(Protocol):
    """The drafter of one instance."""

    def draft(self, carry: Carry, drafts: Drafts) -> Carry:
        """Return the carry with drafted tokens for `drafts.rows`, before the step that verifies them."""

    def follow(self, carry: Carry, batch: Batch, spans: Sequence[Span]) -> None:
        """Observe a dispatched step, before its tokens are sampled, for example to compute prompt KV."""

    def begin(self, slot: int, start: int) -> None:
        """Start a request in a slot; the KV of its first `start` tokens is present."""

    @property
    def allocation(self) -> list[Call]:
        """The programs that `rebuild` runs."""

    def rebuild(self) -> None:
        """Reset all state."""

    def export(self, pages: Int32) -> tuple[jax.Array, ...]:
        """Export the drafter's part of `pages`; () if it has none."""

    def fill(self, pages: Int32, kv_buffer: Sequence[jax.Array]) -> None:
        """Import the drafter's part of `pages`."""

    def receive(self, kv_buffer: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Copy the drafter's part of another instance's KV buffer onto this mesh."""

    def kv_buffer(self, size: int) -> tuple[Any, ...]:
        """Return a KV buffer of zeros, as numpy arrays."""

    def calls(self, carry: Carry) -> list[Call]:
        """Return the drafter's programs, for warm-up."""

    def run(self, carry: Carry) -> None:
        """Run the programs that steps of padding do not run, for warm-up."""


class NGram:
    """Prompt lookup: drafts what followed an earlier occurrence of the last tokens (`speculate.ngram`)."""

    def __init__(self, mesh: Mesh, limits: Limits, *, least: int, most: int) -> None:
        """least, most: number of tokens that must agree; see `speculate.ngram`."""
        whole = NamedSharding(mesh.abstract_mesh, PartitionSpec())
        self._limits = limits
        find = partial(ngram, count=limits.draft, least=least, most=most)
        self._look = Program(partial(_look, find=find), "look_up", whole, (0,))

    def draft(self, carry: Carry, drafts: Drafts) -> Carry:
        return carry._replace(tokens=self._look(carry.tokens, carry.history, drafts.rows))

    def follow(self, carry: Carry, batch: Batch, spans: Sequence[Span]) -> None:
        """No state: the history has the prompt from the start."""

    def begin(self, slot: int, start: int) -> None:
        """No state."""

    @property
    def allocation(self) -> list[Call]:
        return []

    def rebuild(self) -> None:
        """No state."""

    def export(self, pages: Int32) -> tuple[jax.Array, ...]:
        return ()

    def fill(self, pages: Int32, kv_buffer: Sequence[jax.Array]) -> None:
        """No state."""

    def receive(self, kv_buffer: Sequence[Any]) -> tuple[jax.Array, ...]:
        return ()

    def kv_buffer(self, size: int) -> tuple[Any, ...]:
        return ()

    def calls(self, carry: Carry) -> list[Call]:
        sizes = [bucket.rows for bucket in self._limits.buckets if bucket.decode]
        rows = [idle_rows(size, self._limits.row_pages, self._limits.slots) for size in sizes]
        return [Call(f"look up {len(row)}", self._look, (carry.tokens, carry.history, row)) for row in rows]

    def run(self, carry: Carry) -> None:
        """Steps of padding run all programs."""


def _look(tokens: jax.Array, history: jax.Array, rows: jax.Array, *, find: Any) -> jax.Array:
    """Return carry tokens [slots, 1 + K] with K drafted for each of `rows` [S, len(DraftColumn) + P]."""
    slots = rows[:, DraftColumn.SLOT]
    mine = history[jnp.clip(slots, 0, history.shape[0] - 1)]
    drafted = find(mine, rows[:, DraftColumn.START] + 1)
    return drafted_into(tokens, slots, drafted)


def drafted_into(tokens: jax.Array, slots: jax.Array, drafted: jax.Array) -> jax.Array:
    """Write drafted tokens [S, K] after the last token of each slot [S] in the carry."""
    columns = 1 + np.arange(drafted.shape[1])[None]
    return tokens.at[slots[:, None], columns].set(jnp.maximum(drafted, 0), mode="drop")
