"""Step times and the gaps between steps, from the journal of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from jaxserve.sched.journal import result_of


def gaps(lines: Iterable[str], began: float, rows: int) -> dict[str, float]:
    """Return the times of the full steps of `rows` rows after `began`, and of the gaps between them, from a journal."""
    results = [result_of(record) for record in map(json.loads, lines) if record["kind"] == "settle"]
    steps = [(one.started, one.finished) for one in results if one.started > began and len(one.tokens) == rows]
    taken = [end - start for start, end in steps]
    found = [start - end for (_, end), (start, _) in pairwise(steps)]
    return {
        "steps": len(steps),
        "step_ms": 1e3 * median(taken),
        "gap_ms_mean": 1e3 * sum(found) / len(found),
        "gap_share": sum(found) / (sum(found) + sum(taken)),
        "planned_ahead": sum(gap <= 1e-6 for gap in found) / len(found),
    }
