"""The time that instances have to spare."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ..api.request import BEST_EFFORT, Request

UNPROMISED = 0.05  # seconds: the slack of requests without an objective


def least_slack(residents: Iterable[tuple[float, Iterable[Request]]]) -> float:
    """Return the least time from the predicted end of a step to the deadline of a resident's next token.

    Seconds; inf if nothing runs. residents: (predicted end, requests) of each instance.

    A request that is late or has no objective counts as UNPROMISED: ignoring it could delay it
    without limit, and counting it as late would keep garbage forever under overload.
    """
    least = inf
    for end, requests in residents:
        for request in requests:
            slack = -1.0 if request.tier == BEST_EFFORT else request.deadline - end
            least = min(least, slack if 0 <= slack < inf else UNPROMISED)
    return least
