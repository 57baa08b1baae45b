"""The programs of an instance, with arguments as when serving, in the order in which an engine makes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.engine.memory.transfer import padded, piece_sizes
from jaxserve.engine.programs.draft_inputs import idle_drafts
from jaxserve.engine.programs.inputs import Batch, Bucket, Float32, Layout, SlotTable
from jaxserve.engine.programs.pooling import POOLED
from jaxserve.engine.programs.segments import pools_of
from jaxserve.engine.programs.step import SCORED, extras
from jaxserve.engine.runtime.device_state import DeviceState
from jaxserve.engine.speculation.drafters import Call
from jaxserve.structured.token_filter import all_allowed


class Rung(NamedTuple):
    """Programs that are made together, and the buckets that an instance can use from then on."""

    buckets: tuple[Bucket, ...]
    calls: list[Call]
    last: bool  # `inner_calls` follow, and the instance is complete


def rungs(state: DeviceState, *, early: bool, alone: bool = False, exchanges: bool = False) -> list[Rung]:
    """Return the programs of an instance in the order in which they are made.

    early: the first rung can compute anything, at the cost of larger programs than needed; the others are made while
    the engine serves. Otherwise there is one rung. alone: no other instance takes pages from this one. exchanges: other
    processes take and give pages, in pieces of any size, since they may have all programs by then.
    """
    limits = state.programs.limits
    first = limits.first_buckets if early else limits.buckets
    widths = {bucket.width for bucket in first}
    sizes = piece_sizes(limits.row_pages)
    steps = [call for bucket in reversed(first) for call in step_calls(state, bucket)]
    draws = [call for width in sorted(widths) for call in draw_calls(state, width)]
    rest = [*masked_calls(state), *begin_calls(state), *drafting_calls(state)]
    pieces = [call for size in sizes for call in piece_calls(state, size)]  # the last one takes the largest piece
    if not early:
        return [Rung(first, _abstract([*steps, *draws, *common_calls(state), *rest, *pieces]), True)]
    later = 0 if exchanges else len(pieces) - (1 if alone else 2)
    rungs = [Rung(first, _abstract([*steps, *draws, *common_calls(state), *pieces[later:]]), False)]
    for bucket in _between(limits.buckets, first):
        calls = step_calls(state, bucket)
        if bucket.width not in widths:
            widths.add(bucket.width)
            calls += draw_calls(state, bucket.width)
        rungs.append(Rung((bucket,), _abstract(calls), False))
    return [*rungs, Rung((), _abstract([*rest, *pieces[:later]]), True)]


def _between(buckets: Sequence[Bucket], first: Sequence[Bucket]) -> Iterator[Bucket]:
    """Yield the buckets that are not among the first ones, so that the largest gaps between sizes close first."""
    decode = _halved([bucket for bucket in buckets if bucket.decode and bucket not in first])
    prompts = [bucket for bucket in buckets if bucket.prompts and bucket not in first]
    prompts = _halved(prompts)
    while decode or prompts:
        for some in (decode, prompts):
            if some:
                yield some.pop(0)
    yield from (bucket for bucket in buckets if bucket.verify and bucket not in first)


def _halved(buckets: list[Bucket]) -> list[Bucket]:
    """Order sizes by halving: the middle one, then the middles of both halves, and so on."""
    parts, coarse = [buckets], list[Bucket]()
    while parts:
        part = parts.pop(0)
        if part:
            at = len(part) // 2
            coarse.append(part[at])
            parts += [part[:at], part[at + 1 :]]
    return coarse


def _abstract(calls: Iterable[Call]) -> list[Call]:
    """Describe the arrays of calls, which are donated and replaced while the engine serves."""
    return [call._replace(args=jax.tree.map(_described, call.args)) for call in calls]


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.aval.weak_type)


def idle_batch(bucket: Bucket, slots: SlotTable, *, full: bool) -> Batch:
    """Return a step of padding, which writes and samples nothing."""
    packed = np.zeros(Layout.of(bucket, slots.limits).end, np.int32)
    sampling = slots.columns[np.full(bucket.width, slots.limits.slots)]
    return Batch(bucket, packed, sampling, full, None, (), arguments=idle_arguments(bucket.width, slots))


def idle_arguments(width: int, slots: SlotTable) -> Float32 | None:
    """Return `Batch.arguments` of padding."""
    return slots.arguments[np.full(width, slots.limits.slots)] if slots.limits.processors else None


def idle_drafting(bucket: Bucket, depth: int, row_pages: int, slots: SlotTable) -> Batch:
    """Return a step of padding that drafts."""
    batch = idle_batch(bucket, slots, full=False)
    assert batch.sampling is not None
    size = next(
        shape.rows
        for shape in slots.limits.buckets
        if shape.decode and shape.rows >= min(bucket.rows, slots.limits.slots)
    )
    return batch._replace(drafts=idle_drafts(depth, size, row_pages, batch.sampling, slots.limits.slots))


def step_calls(state: DeviceState, bucket: Bucket) -> list[Call]:
    """Return the programs of steps of a bucket, without sampling."""
    programs, packed = state.programs, idle_batch(bucket, SlotTable(state.programs.limits), full=False).packed
    calls = [Call(bucket.label, programs.step[bucket], (state.weights, state.pools, state.carry.tokens, packed))]
    if bucket.prompts:
        tokens, none = bucket.tokens, np.zeros(POOLED, np.int32)
        hidden = state.described(jax.ShapeDtypeStruct((tokens, programs.spec.dim), state.weights["embed"].dtype))
        calls.append(Call(f"block {tokens}", programs.block[tokens], (hidden, np.int32(0))))
        calls.append(Call(f"pool {tokens}", programs.pool[tokens], (hidden, none, none)))
    return calls


def _drawn(state: DeviceState, width: int) -> tuple[tuple[Any, ...], SlotTable]:
    """Return the first arguments of programs that sample for `width` rows."""
    slots = SlotTable(state.programs.limits)
    rows = jax.ShapeDtypeStruct((width, state.programs.spec.dim), state.weights["embed"].dtype)
    return (state.weights, state.described(rows), state.carry), slots


def draw_calls(state: DeviceState, width: int) -> list[Call]:
    """Return the programs that sample for `width` rows."""
    (weights, rows, carry), slots = _drawn(state, width)
    sampling, arguments = slots.columns[np.full(width, slots.limits.slots)], idle_arguments(width, slots)
    ids, values, masks = state.unadjusted(width)
    plain = weights, rows, carry, sampling, *extras(None, arguments)
    full = weights, rows, carry, state.counts, sampling, ids, values, np.int32(0), *extras(masks, arguments)
    programs = state.programs
    return [Call(f"draw {width}", programs.draw, plain), Call(f"draw fully {width}", programs.full, full)]


def masked_calls(state: DeviceState) -> list[Call]:
    """Return the programs that sample among allowed tokens; `full` does it too, and takes longer."""
    calls = []
    for width in state.programs.limits.widths:
        first, slots = _drawn(state, width)
        masks, arguments = all_allowed(width, slots.limits.vocab), idle_arguments(width, slots)
        args = *first, slots.columns[np.full(width, slots.limits.slots)], *extras(masks, arguments)
        calls.append(Call(f"draw masked {width}", state.programs.masked, args))
    return calls


def common_calls(state: DeviceState) -> list[Call]:
    """Return the programs that do not depend on a bucket."""
    programs, limits = state.programs, state.programs.limits
    block = jax.ShapeDtypeStruct((SCORED, programs.spec.dim), state.weights["embed"].dtype)
    scored = state.weights, state.described(block), np.zeros(SCORED, np.int32)
    remembered = state.counts, np.int32(0), np.zeros(limits.vocab, np.int16)
    return [
        Call("score", programs.score, scored), Call("remember", programs.remember, remembered), *_state_calls(state)
    ]  # fmt: skip


def _state_calls(state: DeviceState) -> list[Call]:
    """Return the programs that move what layers with a state keep of a slot."""
    if not state.states:
        return []
    moves, slot = state.programs.moves, np.int32(0)
    held = tuple(
        jax.ShapeDtypeStruct((len(state.states), *array.shape[1:]), array.dtype, sharding=array.sharding)
        for array in state.states[0]
    )
    return [
        Call("take state", moves.take, (state.states, slot)),
        Call("put state", moves.put, (state.states, slot, held)),
    ]


def piece_calls(state: DeviceState, size: int) -> list[Call]:
    """Return the programs that move `size` pages out of the pools and into them."""
    moves, pages = state.programs.moves, padded((), size, state.programs.limits.pages)
    return [
        Call(f"export {size}", moves.gather, (state.kv, pages)),
        Call(f"import {size}", moves.scatter, (state.kv, pages, state.kv_buffer(size)[0])),
    ]


def begin_calls(state: DeviceState) -> list[Call]:
    """Return the programs that begin preemptible steps."""
    calls, slots = [], SlotTable(state.programs.limits)
    for bucket, begin in () if state.segments is None else reversed(state.segments.begin.items()):
        packed = idle_batch(bucket, slots, full=False).packed
        calls.append(Call(f"begin {bucket.tokens}", begin, (state.outer, state.carry.tokens, packed)))
    return calls


def drafting_calls(state: DeviceState) -> list[Call]:
    """Return the programs of steps that draft."""
    programs, limits, calls = state.programs, state.programs.limits, []
    if state.drafter is None:
        return []
    slots, dtype, seen = SlotTable(limits), state.weights["embed"].dtype, set()
    for bucket in limits.buckets:
        for depth in () if bucket.decode else limits.depths:
            drafts = idle_drafting(bucket, depth, limits.row_pages, slots).drafts
            assert drafts is not None
            hidden = state.replicated((bucket.tokens, programs.spec.dim), dtype)
            if (shape := (bucket.tokens, len(drafts.places))) in seen:
                continue
            seen.add(shape)
            calls.append(Call(f"pick {len(drafts.places)} of {bucket.tokens}", programs.pick, (hidden, drafts.places)))
    for width in limits.widths:
        for depth in limits.depths:
            rows = state.replicated((width * (1 + depth), programs.spec.dim), dtype)
            sampling, lengths = slots.columns[np.full(width, limits.slots)], np.zeros(width, np.int32)
            given = state.weights, rows, state.carry, sampling, lengths
            masks, arguments = all_allowed(width * (1 + depth), limits.vocab), idle_arguments(width, slots)
            plain, masked = (*given, *extras(None, arguments)), (*given, *extras(masks, arguments))
            calls.append(Call(f"verify {width} x {depth}", programs.verify, plain))
            calls.append(Call(f"verify masked {width} x {depth}", programs.masked_verify, masked))
        slots_of = np.zeros(width, np.int32)
        calls.append(Call(f"drafted {width}", programs.drafted, (state.carry.tokens, slots_of)))
        forced = np.full((width, limits.draft), -1, np.int32)
        calls.append(Call(f"foresee {width}", programs.foresee, (state.carry.tokens, slots_of, forced)))
    row = np.zeros(limits.positions, np.int32)
    calls.append(Call("recall", programs.recall, (state.carry, np.int32(0), row)))
    return [*calls, *state.drafter.calls(state.carry)]


def inner_calls(state: DeviceState) -> list[Call]:
    """Return the programs inside preemptible steps, whose abstract arguments are what the installed `calls` return."""
    segments, slots, calls = state.segments, SlotTable(state.programs.limits), list[Call]()
    for bucket in reversed(segments.buckets) if segments is not None else ():
        assert segments is not None
        args = state.outer, state.carry.tokens, idle_batch(bucket, slots, full=False).packed
        stream, last = state.described(segments.begin[bucket].results(*args))
        for kind, link in {link.kind: link for link in segments.links}.items():
            pools = pools_of(link, state.pools)
            held = state.weights["layers"][link.layers], pools, stream
            calls.append(Call(f"{kind[1].value} {bucket.tokens}", segments.through[kind], held))
        calls.append(Call(f"end {bucket.tokens}", segments.end[bucket], (state.outer, stream.x, last)))
    return calls


def inside(state: DeviceState) -> int:
    """Return the number of `inner_calls`."""
    segments = state.segments
    return 0 if segments is None else len(segments.buckets) * (1 + len({link.kind for link in segments.links}))
