"""The steps of a request's life, with no more spans of other requests than its explanation reads.

A request that waits or decodes for long shares its instance with millions of spans. Each would be an object: a look
at one such request took minutes and hundreds of MB.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf

from jaxserve.engine.runtime.step_record import Step

SPANS = 100_000  # of other requests until the prompt is computed; beyond that, neighboring steps are joined


def condensed(steps: Sequence[Step], id: int, first_token_at: float | None) -> list[Step]:
    """Return the steps, in order, without spans of others that do not say what a request waited for.

    Until its prompt is computed those of others say so. If they are many, neighboring steps without the request become
    one, which takes as long as these together. Later, its own decode steps keep the longest one's spans.
    """
    own = [bool(one.chunks_of(id)) or id in array("i", one.rows) for one in steps]
    chunks = (one.end for one in steps if one.chunks_of(id))
    border = inf if first_token_at is None else max([first_token_at, *chunks])
    decoded = [one for one, mine in zip(steps, own, strict=True) if mine and not one.chunks_of(id)]
    longest = max(decoded, key=lambda one: one.end - one.start, default=None)
    early = [(one, mine) for one, mine in zip(steps, own, strict=True) if one.start < border]
    many = sum(one.spans for one, _ in early) > SPANS
    made = list(_joined(early, id, longest) if many else (one for one, _ in early))
    for one, mine in zip(steps, own, strict=True):
        if one.start >= border:
            made.append(one if one is longest else one.alone(id) if mine else one.empty())
    return made


def _joined(steps: Sequence[tuple[Step, bool]], id: int, longest: Step | None) -> Iterator[Step]:
    for (mine, _), group in groupby(steps, key=lambda one: (one[1], one[0].instance)):
        run = [one for one, _ in group]
        if mine:
            yield from (one if one.chunks_of(id) or one is longest else one.alone(id) for one in run)
        else:
            tokens = Counter[int]()
            for one in run:
                tokens.update(array("i", one.rows))
                tokens.update({request: length for request, _, length, _ in one.chunks})
            seconds = sum(one.end - one.start for one in run)
            spans = tuple((request, 0, length, False) for request, length in tokens.items())
            yield Step(run[0].instance, run[0].start, run[0].start + seconds, False, spans, b"", b"", 0)
