"""Who drafts: one protocol, and the drafter that needs no model.

A drafter fills the carry's columns behind the last token, on the device, from what the device knows; the host tells it
rows, positions and lengths only. Letters: S rows that draft, P pages per row.
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
from jaxserve.engine.programs.speculate import ngram
from jaxserve.engine.programs.step import Carry, Program, jitted
from jaxserve.sched.api.plan import Span


class Call(NamedTuple):
    """A program with arguments as in service."""

    label: str
    program: Any  # a jitted function
    args: tuple[Any, ...]


class Drafter(Protocol):
    """One instance's."""

    def draft(self, carry: Carry, drafts: Drafts) -> Carry:
        """The carry with the drafted tokens of `drafts.rows`, before the step that verifies them."""

    def follow(self, carry: Carry, batch: Batch, spans: Sequence[Span]) -> None:
        """A step is dispatched, and its tokens are not drawn yet: what it computes of prompts may be kept."""

    def begin(self, slot: int, start: int) -> None:
        """A request takes the slot; the KV of its first `start` tokens is here."""

    def rebuild(self) -> None:
        """What was kept is gone."""

    def export(self, pages: Int32) -> tuple[jax.Array, ...]:
        """What goes with pages that leave; nothing where pages hold nothing of it."""

    def fill(self, pages: Int32, parcel: Sequence[jax.Array]) -> None:
        """What came with pages."""

    def receive(self, parcel: Sequence[Any]) -> tuple[jax.Array, ...]:
        """A parcel of another instance, on this mesh."""

    def parcel(self, size: int) -> tuple[Any, ...]:
        """A parcel of zeros, of numpy."""

    def calls(self, carry: Carry) -> list[Call]:
        """Its programs, for warm-up."""

    def run(self, carry: Carry) -> None:
        """Run those that steps of padding do not come to, for warm-up."""


class NGram:
    """Prompt lookup: what followed the last few tokens where they occurred before (`speculate.ngram`)."""

    def __init__(self, mesh: Mesh, limits: Limits, *, least: int, most: int) -> None:
        """least, most: tokens that must agree, see `speculate.ngram`."""
        whole = NamedSharding(mesh.abstract_mesh, PartitionSpec())
        self._limits = limits
        find = partial(ngram, count=limits.draft, least=least, most=most)
        self._look: Program = jitted(partial(_look, find=find), "look_up", whole, (0,))

    def draft(self, carry: Carry, drafts: Drafts) -> Carry:
        return carry._replace(tokens=self._look(carry.tokens, carry.history, drafts.rows))

    def follow(self, carry: Carry, batch: Batch, spans: Sequence[Span]) -> None:
        """The history has the prompt from the start."""

    def begin(self, slot: int, start: int) -> None:
        """It keeps nothing."""

    def rebuild(self) -> None:
        """It keeps nothing."""

    def export(self, pages: Int32) -> tuple[jax.Array, ...]:
        return ()

    def fill(self, pages: Int32, parcel: Sequence[jax.Array]) -> None:
        """Nothing came."""

    def receive(self, parcel: Sequence[Any]) -> tuple[jax.Array, ...]:
        return ()

    def parcel(self, size: int) -> tuple[Any, ...]:
        return ()

    def calls(self, carry: Carry) -> list[Call]:
        sizes = [bucket.rows for bucket in self._limits.buckets if bucket.decode]
        rows = [idle_rows(size, self._limits.row_pages, self._limits.slots) for size in sizes]
        return [Call(f"look up {len(one)}", self._look, (carry.tokens, carry.history, one)) for one in rows]

    def run(self, carry: Carry) -> None:
        """Steps of padding come to all."""


def _look(tokens: jax.Array, history: jax.Array, rows: jax.Array, *, find: Any) -> jax.Array:
    """Carry tokens [slots, 1 + K] with K drafted for each of `rows` [S, len(DraftColumn) + P]."""
    slots = rows[:, DraftColumn.SLOT]
    mine = history[jnp.clip(slots, 0, history.shape[0] - 1)]
    drafted = find(mine, rows[:, DraftColumn.START] + 1)
    return drafted_into(tokens, slots, drafted)


def drafted_into(tokens: jax.Array, slots: jax.Array, drafted: jax.Array) -> jax.Array:
    """Carry tokens with drafted ones [S, K] behind the last of each slot [S]."""
    columns = 1 + np.arange(drafted.shape[1])[None]
    return tokens.at[slots[:, None], columns].set(jnp.maximum(drafted, 0), mode="drop")
