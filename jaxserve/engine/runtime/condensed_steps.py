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
    own = [bool(step.chunks_of(id)) or id in array("i", step.rows) for step in steps]
    chunks = (step.end for step in steps if step.chunks_of(id))
    border = inf if first_token_at is None else max([first_token_at, *chunks])
    decoded = [step for step, mine in zip(steps, own, strict=True) if mine and not step.chunks_of(id)]
    longest = max(decoded, key=lambda step: step.end - step.start, default=None)
    early = [(step, mine) for step, mine in zip(steps, own, strict=True) if step.start < border]
    many = sum(step.spans for step, _ in early) > SPANS
    kept = list(_joined(early, id, longest) if many else (step for step, _ in early))
    for step, mine in zip(steps, own, strict=True):
        if step.start >= border:
            kept.append(step if step is longest else step.alone(id) if mine else step.empty())
    return kept


def _joined(steps: Sequence[tuple[Step, bool]], id: int, longest: Step | None) -> Iterator[Step]:
    for (mine, _), group in groupby(steps, key=lambda pair: (pair[1], pair[0].instance)):
        run = [step for step, _ in group]
        if mine:
            yield from (step if step.chunks_of(id) or step is longest else step.alone(id) for step in run)
        else:
            tokens = Counter[int]()
            for step in run:
                tokens.update(array("i", step.rows))
                tokens.update({request: length for request, _, length, _ in step.chunks})
            seconds = sum(step.end - step.start for step in run)
            spans = tuple((request, 0, length, False) for request, length in tokens.items())
            yield Step(run[0].instance, run[0].start, run[0].start + seconds, False, spans, b"", b"", 0)
