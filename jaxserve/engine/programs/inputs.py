"""Conversion of a StepPlan into the few arrays that a step takes.

Numpy only; runs on the engine's thread before every step. Letters: T tokens, S rows, P pages per
row, G sampling rows, A adjusted tokens of a row, C logits processors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.engine.programs import draft_inputs as drafting
from jaxserve.engine.programs.sampling import ADJUSTED, Column
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.plan import LEAST_SHARING, Begin, SharedPrefix, Span

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
NOT_ASKED = np.float32(np.nan)  # in place of the argument of a logits processor; a request's own is finite
FROM_CARRY = -1  # placeholder of a token that is on the device; -2 and below: the tokens drafted after it, in order
ALWAYS = np.iinfo(np.int64).max
# 64, 96, 128, 192, 256, ...: pads a chunk by less than half, with 15 programs up to 8192 tokens.
LADDER = tuple(base << power for power in range(16) for base in (64, 96))
FLOATS = {
    Column.TEMPERATURE: "temperature",
    Column.TOP_P: "top_p",
    Column.MIN_P: "min_p",
    Column.REPETITION: "repetition_penalty",
    Column.PRESENCE: "presence_penalty",
    Column.FREQUENCY: "frequency_penalty",
}
# Devices take a number below float32's least for 0, which would be no cut; logits divided by one are infinite.
LEAST = {Column.TEMPERATURE: 1e-30, Column.TOP_P: float(np.finfo(np.float32).tiny)}


def banned(params: SamplingParams, eos: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that may not be sampled before `min_tokens` tokens."""
    return tuple(dict.fromkeys((*eos, *params.stop_token_ids)))


def check_adjusted(params: SamplingParams, eos: Sequence[int]) -> None:
    """Raise InvalidValue if a request adjusts more tokens than the programs have room for."""
    ends = len(banned(params, eos)) if params.min_tokens else 0
    if ends + len(params.logit_bias) > ADJUSTED:
        raise InvalidValue(
            f"{ends} end-of-text ids (banned by min_tokens={params.min_tokens}) and {len(params.logit_bias)} in "
            f"logit_bias are together more than {ADJUSTED}",
            "stop_token_ids",
        )


class Bucket(NamedTuple):
    """The shape of a step program."""

    tokens: int  # T
    rows: int  # S
    width: int  # G: rows of the sampling program that follows
    decode: bool  # every row is one token, so T = S
    verify: bool = False  # rows are decodes with drafted tokens; none is a prompt chunk

    @property
    def prompts(self) -> bool:
        """Whether rows may be chunks of prompts."""
        return not (self.decode or self.verify)

    @property
    def label(self) -> str:
        return f"decode {self.rows}" if self.decode else f"{'verify' if self.verify else 'step'} {self.tokens}"


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that determine the shapes of an instance's programs."""

    slots: int  # max_num_seqs
    tokens: int  # max_num_batched_tokens
    pages: int  # N
    page_size: int  # B
    row_pages: int  # P
    vocab: int  # V
    draft: int = 0  # largest number of tokens that a row drafts in a step
    scores: bool = False  # the draft's logits are kept, see `speculate.probabilistic`
    ladder: tuple[int, ...] = LADDER  # sizes of the programs that compute prompt tokens
    cascade: bool = False  # rows that share a prefix read it once
    processors: tuple[str, ...] = ()  # names of the logits processors, which are applied in this order

    def groups(self, bucket: Bucket) -> int:
        """Return the largest number of groups of rows that share a prefix in a step."""
        return bucket.rows // LEAST_SHARING if self.cascade else 0

    @property
    def depths(self) -> tuple[int, ...]:
        """The draft lengths that have programs: few, because each costs start-up time."""
        return _ladder(1, self.draft, 4) if self.draft else ()

    def depth(self, drafted: int) -> int:
        """Return the smallest of `depths` that holds `drafted` tokens."""
        return next(depth for depth in self.depths if depth >= drafted)

    @property
    def positions(self) -> int:
        """The number of tokens of the longest request."""
        return self.row_pages * self.page_size

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of rows that have a sampling program."""
        return _ladder(min(8, self.slots), self.slots, 4)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All step programs, decode-only ones first, then by size: few, because each costs start-up time."""
        rows = (1, *_ladder(4, self.slots, 2)) if self.slots > 4 else _ladder(1, self.slots, 2)
        decode = [Bucket(n, n, self.width(n), True) for n in rows]
        most = max(self.tokens, self.slots)
        mixed = prompt_sizes(self.ladder, most)
        verify = [
            Bucket(n * (1 + depth), n, self.width(n), False, True)
            for depth in self.depths
            for n in rows
            if n * (1 + depth) <= most
        ]
        return *decode, *verify, *(Bucket(n, min(n, self.slots), self.width(min(n, self.slots)), False) for n in mixed)

    @property
    def first_buckets(self) -> tuple[Bucket, ...]:
        """Programs that can compute anything, and determine the fit of step times.

        The smallest and the largest that decode, and for prompt tokens. A short prompt in the largest one would take
        several times as long, and keep every request that decodes on its devices waiting.
        """
        decode = [bucket for bucket in self.buckets if bucket.decode]
        prompts = [bucket for bucket in self.buckets if bucket.prompts]
        return tuple(dict.fromkeys((decode[0], decode[-1], prompts[0], prompts[-1])))

    def width(self, rows: int) -> int:
        return next(width for width in self.widths if width >= rows)


def prompt_sizes(ladder: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the sizes of the programs that compute prompt tokens, in steps of at most `most` tokens."""
    return *(size for size in ladder if size < most), most


def _ladder(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Return first, first * factor, ..., last."""
    steps = []
    while first < last:
        steps.append(first)
        first *= factor
    return *steps, last


class Batch(NamedTuple):
    """The inputs of one step, ready for the device."""

    bucket: Bucket
    packed: Int32  # see `Layout`
    sampling: Int32 | None  # [G, len(Column)]; None if no row samples
    full: bool  # some row needs `draw_full`
    adjust: tuple[Int32, Float32, int] | None  # ids and values [G, A], columns used
    logprobs: tuple[int, ...]  # per span, number of alternatives; -1: none requested
    drafts: drafting.Drafts | None = None  # if a row drafts
    constrained: tuple[int, ...] = ()  # indices of the spans that may not sample every token
    arguments: Float32 | None = None  # [G, C], NOT_ASKED where a row asks for none; None without logits processors


class Layout(NamedTuple):
    """The offsets of the parts of `Batch.packed`."""

    starts: int
    lengths: int
    contexts: int
    slots: int
    last: int
    tables: int
    sharing: int  # of each row: 1 + its group, or 0; none of the three parts without groups
    leaders: int  # of each group: one of its rows
    shared: int  # of each group: the pages that its rows share
    end: int

    @classmethod
    def of(cls, bucket: Bucket, limits: Limits) -> Layout:
        t, s, groups = bucket.tokens, bucket.rows, limits.groups(bucket)
        sharing = t + 5 * s + s * limits.row_pages
        leaders = sharing + (s if groups else 0)
        end = leaders + 2 * groups
        return cls(t, t + s, t + 2 * s, t + 3 * s, t + 4 * s, t + 5 * s, sharing, leaders, leaders + groups, end)


class SlotTable:
    """The host's state of each slot. Writer: the executor that owns it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        slots = limits.slots
        self.tables = np.zeros((slots, limits.row_pages), np.int32)
        self.pages = np.zeros(slots, np.int64)  # used columns of `tables`
        self.columns = np.zeros((slots + 1, len(Column)), np.int32)  # the last row is padding: greedy, no slot
        self.columns[:, [Column.SLOT, Column.HISTORY]] = slots
        self.columns[:, [Column.TOP_P, Column.REPETITION]] = np.float32(1).view(np.int32)
        self.full_until = np.zeros(slots + 1, np.int64)  # positions below need `draw_full`, which samples one token
        self.bans_until = np.zeros(slots, np.int64)  # positions below may not end the text
        self.bans: dict[int, Int32] = {}
        self.biases: dict[int, tuple[Int32, Float32]] = {}
        self.arguments = np.full((slots + 1, len(limits.processors)), NOT_ASKED, np.float32)  # the last row is padding
        self.begins: dict[int, Begin] = {}
        self.scored: dict[int, tuple[int, ...]] = {}  # prompts with requested log-probabilities
        self.pooled: dict[int, str] = {}  # how to pool the prompts of requests that want a vector

    def begin(self, slot: int, begin: Begin) -> None:
        """Start a request in a slot."""
        self.release(slot)
        params, row = begin.params, self.columns[slot]
        biased = [token for token, _ in params.logit_bias]
        self.begins[slot] = begin
        floats = row.view(np.float32)
        for column, name in FLOATS.items():
            value = getattr(params, name)
            floats[column] = max(value, LEAST.get(column, value)) if value > 0 else value
        history = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        row[Column.SLOT] = slot
        row[Column.TOP_K] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        row[Column.HISTORY] = slot if history else self.limits.slots
        row[[Column.SEED, Column.SEED_HIGH]] = np.array([begin.seed & (2**64 - 1)], np.uint64).view(np.int32)
        row[Column.LOGPROBS] = params.logprobs is not None
        if params.min_tokens and not params.constrained:  # masks include bans
            self.bans_until[slot] = begin.prompt_length + min(params.min_tokens, np.iinfo(np.int32).max)
            self.bans[slot] = np.array(banned(params, begin.eos), np.int32)[: ADJUSTED - len(biased)]
        if biased:
            self.biases[slot] = np.array(biased, np.int32), np.array([b for _, b in params.logit_bias], np.float32)
        for name, argument in params.logits_processors:
            self.arguments[slot, self.limits.processors.index(name)] = argument
        alone = history or biased or params.logprobs is not None
        self.full_until[slot] = ALWAYS if alone else self.bans_until[slot]
        if params.prompt_logprobs is not None:
            self.scored[slot] = begin.prompt[: begin.prompt_length]
        if params.pooling is not None:
            self.pooled[slot] = params.pooling

    def keeps_history(self, slot: int) -> bool:
        """Return whether the slot's request has penalties, which need counts of its tokens."""
        return bool(self.columns[slot, Column.HISTORY] == slot)

    def extend(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to the slot's block table."""
        used = int(self.pages[slot])
        if used + len(pages) > self.limits.row_pages:
            raise InvalidValue(f"{slot=} has {used + len(pages)} pages, more than the {self.limits.row_pages} of a row")
        self.tables[slot, used : used + len(pages)] = pages
        # Kernels read whole tiles of pages, so padding must not be another row's pages: they may hold NaN.
        self.tables[slot, used + len(pages) :] = pages[-1]
        self.pages[slot] = used + len(pages)

    def held(self, slot: int) -> list[int]:
        """Return the slot's pages, in order."""
        pages: list[int] = self.tables[slot, : int(self.pages[slot])].tolist()
        return pages

    def hears(self, slot: int, start: int) -> bool:
        """Return whether hidden states of tokens from position `start` are pooled, or score tokens of the prompt."""
        return slot in self.pooled or start + 1 < len(self.scored.get(slot, ()))

    def release(self, slot: int) -> None:
        self.columns[slot] = self.columns[-1]
        self.arguments[slot] = NOT_ASKED
        self.pages[slot] = self.full_until[slot] = self.bans_until[slot] = 0
        for table in (self.bans, self.biases, self.begins, self.scored, self.pooled):
            table.pop(slot, None)


class InputBuilder:
    """Packs plans into new buffers; the CPU backend still reads the old ones while it computes.

    Writer: the executor that owns it, which opens buckets as their programs become ready.
    """

    def __init__(self, limits: Limits, ready: Collection[Bucket] | None = None) -> None:
        """ready: the buckets whose programs are ready; None: all."""
        self.limits = limits
        self._ready: set[Bucket] = set()
        self.open(limits.buckets if ready is None else ready)

    def open(self, buckets: Collection[Bucket]) -> None:
        """Use these buckets too from now on."""
        self._ready.update(buckets)
        ready = [bucket for bucket in self.limits.buckets if bucket in self._ready]
        self._decode = [bucket for bucket in ready if bucket.decode]
        self._verify = sorted(bucket for bucket in ready if bucket.verify)
        self._mixed = [bucket for bucket in ready if bucket.prompts]

    @property
    def ready(self) -> frozenset[Bucket]:
        """The buckets in use."""
        return frozenset(self._ready)

    def bucket(self, rows: int, tokens: int, *, verify: bool = False, heard: bool = False) -> Bucket:
        """Return the smallest program for a step.

        verify: all rows are running decodes. heard: hidden states of prompt tokens are used, which only programs for
        prompt tokens come with. Raises InvalidValue if no program is large enough.
        """
        if rows <= self.limits.slots:
            some = self._mixed
            if not heard:
                some = self._decode if tokens == rows else [*self._verify, *self._mixed] if verify else self._mixed
            for bucket in some:
                if bucket.tokens >= tokens and (bucket.rows >= rows or not bucket.verify):
                    return bucket
        raise InvalidValue(
            f"a step of {rows} rows and {tokens} tokens is larger than {self.limits.slots} rows and "
            f"{self.limits.tokens} tokens"
        )

    def build(self, spans: Sequence[Span], slots: SlotTable, shared: Sequence[SharedPrefix] = ()) -> Batch:
        """Build the arrays of a step; new pages and requests must already be in `slots`."""
        _, slot, start, length, _, tokens, draft, samples, _ = zip(*spans, strict=True)
        rows, total = len(spans), sum(length)
        drafted = max(draft)
        heard = bool(slots.pooled or slots.scored) and any(map(slots.hears, slot, start))
        bucket = self.bucket(rows, total, verify=drafted > 0 and total == rows + sum(draft), heard=heard)
        at = Layout.of(bucket, self.limits)
        ids = np.array(slot)
        lengths = np.array(length)
        contexts = np.array(start) + lengths
        packed = np.zeros(at.end, np.int32)
        packed[:total] = _tokens(tokens, length, draft)
        ends = np.cumsum(lengths)
        packed[at.starts : at.lengths] = total
        packed[at.starts : at.starts + rows] = ends - lengths
        packed[at.lengths : at.lengths + rows] = lengths
        packed[at.contexts : at.contexts + rows] = contexts
        packed[at.slots : at.slots + rows] = ids
        packed[at.last : at.last + rows] = ends - 1
        tables = packed[at.tables : at.sharing].reshape(bucket.rows, self.limits.row_pages)
        np.take(slots.tables, ids, axis=0, out=tables[:rows], mode="clip")
        if self.limits.cascade:
            for index, group in enumerate(shared):
                packed[at.sharing + np.array(group.spans)] = 1 + index
                packed[at.leaders + index], packed[at.shared + index] = group.spans[0], group.pages
        if not any(samples):
            return Batch(bucket, packed, None, False, None, ())
        drawn = np.full(bucket.width, self.limits.slots)
        drawn[:rows] = ids if all(samples) else np.where(samples, ids, self.limits.slots)
        sampling = slots.columns[drawn]  # [G, len(Column)]
        sampling[:rows, Column.POSITION] = contexts
        alone, drafts = contexts < slots.full_until[drawn[:rows]], None
        if drafted:
            drafts = drafting.drafts_of(
                drafting.DraftRows(ids, np.array(start), np.array(draft), ends, alone),
                depth=self.limits.depth(drafted),
                ladder=[bucket.rows for bucket in self._decode],
                sampling=sampling,
                tables=tables[:rows],
                slots=self.limits.slots,
            )
            sampling[:rows][~alone] = slots.columns[-1]
        full = bool(alone.any())
        adjust = _adjust(drawn[:rows].tolist(), contexts, bucket.width, slots) if full else None
        logprobs = _logprobs(slot, samples, slots) if full else ()
        arguments = slots.arguments[drawn] if self.limits.processors else None
        return Batch(bucket, packed, sampling, full, adjust, logprobs, drafts, arguments=arguments)


def _tokens(tokens: Sequence[tuple[int, ...]], lengths: Sequence[int], drafts: Sequence[int]) -> Any:
    """Return all spans' tokens in one list, with placeholders for tokens on the device."""
    if not any(tokens) and not any(drafts):
        return FROM_CARRY
    flat: list[int] = []
    for given, length, draft in zip(tokens, lengths, drafts, strict=True):
        flat.extend(given if given else (FROM_CARRY,) * (length - draft))
        flat.extend(range(FROM_CARRY - 1, FROM_CARRY - 1 - draft, -1))
    return flat


def _adjust(
    drawn: list[int], contexts: npt.NDArray[Any], width: int, slots: SlotTable
) -> tuple[Int32, Float32, int] | None:
    """Return the biases and bans of the sampling rows, or None if there are none."""
    if not slots.bans and not slots.biases:
        return None
    ids = np.full((width, ADJUSTED), slots.limits.vocab, np.int32)
    values = np.zeros((width, ADJUSTED), np.float32)
    most = 0
    for row, slot in enumerate(drawn):
        used = 0
        if slot in slots.biases:
            biased, bias = slots.biases[slot]
            used = len(biased)
            ids[row, :used], values[row, :used] = biased, bias
        if slot in slots.bans and contexts[row] < slots.bans_until[slot]:
            banned = slots.bans[slot]
            ids[row, used : used + len(banned)] = banned
            values[row, used : used + len(banned)] = -np.inf
            used += len(banned)
        most = max(most, used)
    return (ids, values, most) if most else None


def _logprobs(slot: Sequence[int], samples: Sequence[bool], slots: SlotTable) -> tuple[int, ...]:
    wanted = [
        slots.begins[s].params.logprobs if drawn and s in slots.begins else None
        for s, drawn in zip(slot, samples, strict=True)
    ]
    return tuple(-1 if count is None else count for count in wanted) if any(c is not None for c in wanted) else ()
