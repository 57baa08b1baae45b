"""Requests of a workload, and operations on lists of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import overload

import numpy as np

from ..api.errors import InvalidValue
from ..api.new_request import STANDARD
from ..api.request import BEST_EFFORT
from ..api.slo import SLO
from .draws import MAX_PROMPT

DEFAULT_SLO = SLO()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload. Times in seconds since the start of the workload, lengths in tokens.

    hash_ids: names of the leading blocks of the prompt, of `block` tokens each. Equal names are equal tokens.
    tier: request.STANDARD or BEST_EFFORT.
    thinking_tokens: number of leading output tokens in the stage THINKING, including the token that ends it.
        The others are the answer.
    after: index of the previous round, which must be earlier in the list, or None. The request arrives
        `delay` seconds after the last token of that round, and never if that round was refused. Its `time`
        is then that of the first round, and a lower bound. The prompt of a round contains all earlier
        rounds, as its `hash_ids` must say.
    session: see Request.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO = DEFAULT_SLO
    class_: str = ""
    key: str = ""
    hash_ids: tuple[int, ...] = ()
    block: float = 512.0
    tier: str = STANDARD
    thinking_tokens: int = 0
    after: int | None = None
    delay: float = 0.0
    session: str = ""

    def prompt(self, id: int) -> Sequence[int]:
        """Return the prompt's token ids, computed on access. Tokens without `hash_ids` are unique to the request."""
        if self.hash_ids:
            return BlockTokens(self.prompt_tokens, self.hash_ids, self.block, id)
        return range(_own(id), _own(id) + self.prompt_tokens)


class BlockTokens(Sequence[int]):
    """Prompt tokens derived from the names of their blocks. Equal blocks at equal positions have equal tokens.

    Tokens after the last named block are unique to the request.
    """

    __slots__ = ("_block", "_hash_ids", "_id", "_length")

    def __init__(self, length: int, hash_ids: Sequence[int], block: float, id: int) -> None:
        self._length = length
        self._hash_ids = hash_ids
        self._block = block
        self._id = id

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return tuple(self[i] for i in range(start, stop, step))
            return tuple(token for piece in self._pieces(start, stop) for token in piece)
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of a prompt of {self._length}")
        index %= self._length
        return next(self._pieces(index, index + 1))[0]

    def _pieces(self, start: int, stop: int) -> Iterator[range]:
        """Yield the tokens of [start, stop), block by block."""
        while start < stop:
            number = int(start / self._block)
            if ceil((number + 1) * self._block) <= start:  # the division was rounded down
                number += 1
            first, end = ceil(number * self._block), min(ceil((number + 1) * self._block), stop)
            named = number < len(self._hash_ids)
            base = self._hash_ids[number] * MAX_PROMPT + start - first if named else _own(self._id) + start
            yield range(base, base + end - start)
            start = end


def _own(id: int) -> int:
    """Return the first of a request's own token ids, which are negative and so distinct from those of blocks."""
    return (-1 - id) * MAX_PROMPT


def best_effort(arrivals: Sequence[Arrival], share: float, seed: int = 0) -> list[Arrival]:
    """Move a random share of the requests to best effort, without an SLO. The rounds of a session stay together."""
    if not 0 <= share <= 1:
        raise InvalidValue(f"best_effort share={share!r} must be between 0 and 1", "share")
    chosen: list[bool] = []
    for arrival, dice in zip(arrivals, np.random.default_rng((seed, 3)).random(len(arrivals)), strict=True):
        chosen.append(bool(dice < share) if arrival.after is None else chosen[arrival.after])
    return [
        replace(arrival, tier=BEST_EFFORT, slo=SLO(ttft=inf, tpot=inf)) if lowered else arrival
        for arrival, lowered in zip(arrivals, chosen, strict=True)
    ]


def validate(arrivals: Sequence[Arrival]) -> None:
    """Check arrivals for values and order that cannot be served. Raises InvalidValue, which names the index."""
    before = 0.0
    for place, arrival in enumerate(arrivals):
        for ok, what in (
            (0 <= arrival.time < inf, f"time={arrival.time!r} must be 0 or more seconds"),
            (arrival.time >= before, f"time={arrival.time!r} is before {before!r}: arrivals must be in order of time"),
            (arrival.prompt_tokens >= 1, f"prompt_tokens={arrival.prompt_tokens!r} must be at least 1"),
            (arrival.output_tokens >= 1, f"output_tokens={arrival.output_tokens!r} must be at least 1"),
            (
                0 <= arrival.thinking_tokens <= arrival.output_tokens,
                f"thinking_tokens={arrival.thinking_tokens!r} must be 0 to output_tokens={arrival.output_tokens}",
            ),
            (arrival.after is None or 0 <= arrival.after < place, f"after={arrival.after!r} must be an earlier place"),
            (0 <= arrival.delay < inf, f"delay={arrival.delay!r} must be 0 or more seconds"),
            (min(arrival.hash_ids, default=0) >= 0, f"hash_ids={arrival.hash_ids!r} must be 0 or more"),
        ):
            if not ok:
                raise InvalidValue(f"arrival {place}: {what}", "workload")
        before = arrival.time


def scale(arrivals: Sequence[Arrival], *, time: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> list[Arrival]:
    """Multiply arrival times by `time`, and divide lengths by `prompt` and `output`, to at least 1 token.

    The delay between two rounds does not change.
    """
    for name, value in (("time_scale", time), ("prompt_scale", prompt), ("output_scale", output)):
        if not 0 < value < inf:
            raise InvalidValue(f"{name}={value!r} must be positive", name)
    return [
        replace(
            arrival,
            time=arrival.time * time,
            prompt_tokens=max(1, ceil(arrival.prompt_tokens / prompt)),
            output_tokens=max(1, ceil(arrival.output_tokens / output)),
            thinking_tokens=min(ceil(arrival.thinking_tokens / output), max(1, ceil(arrival.output_tokens / output))),
            block=arrival.block / prompt,
        )
        for arrival in arrivals
    ]


def scale_slo(arrivals: Sequence[Arrival], *, ttft: float = 1.0, tpot: float = 1.0) -> list[Arrival]:
    """Multiply every TTFT by `ttft`, and every TPOT, TBT and stage TPOT by `tpot`.

    This is the SLO scale of the papers' figures. Raises InvalidValue if a factor is not positive.
    """
    for name, value in (("ttft", ttft), ("tpot", tpot)):
        if not 0 < value < inf:
            raise InvalidValue(f"slo scale {name}={value!r} must be positive", name)
    return [
        replace(
            arrival,
            slo=SLO(
                arrival.slo.ttft * ttft,
                arrival.slo.tpot * tpot,
                None if arrival.slo.tbt is None else arrival.slo.tbt * tpot,
                tuple((stage, seconds * tpot) for stage, seconds in arrival.slo.stages),
            ),
        )
        for arrival in arrivals
    ]
