"""Scaling on prefill admission budgets: what replicas have promised, and what is about to arrive."""

from __future__ import annotations

from math import inf

from ..admission.prefill_budget import Promised, idle_budget
from ..api.errors import InvalidValue
from ..api.instance_view import InstanceView
from ..routing.base import Fleet
from .base import Arrived

WINDOW = 2.0  # seconds; instead of a TTFT, if requests have none
MOST = 4.0  # times its idle budget that the promises of one replica count at most
PAGES = 0.9  # share of the KV pages in use at which a replica counts as full


class ByBudget:
    """A scaler on the prefill admission budget (PAB) of FairBatching (arXiv 2510.14392, section 3.4).

    The budget is the number of prompt tokens that an instance can take in within a TTFT with all
    promises kept: it falls with the prompts that wait, and with the steps that running decodes need
    within that time, counted from the slack of each. An idle instance has the budget B. So B - PAB is
    what the load has taken of an instance, and with the A prompt tokens expected within a TTFT,

        replicas = (sum of (B - PAB) + A) / (target * B)

    or more if KV pages are scarcer. `target`: share of the budget that should be in use.
    """

    def __init__(self, target: float = 0.7) -> None:
        if not 0 < target <= 1:
            raise InvalidValue(f"{target=} must be more than 0 and at most 1", "scaling")
        self._target = target

    def needed(self, fleet: Fleet, arrivals: Arrived) -> float:
        window = arrivals.ttft if arrivals.ttft < inf else WINDOW
        prompt = max(1, round(arrivals.prompt))
        idle = taken = pages = 0.0
        for instance in fleet.instances:
            whole, used, held = _promises(instance, fleet.now, window, prompt)
            idle, taken, pages = idle + whole, taken + used, pages + held
        expected = arrivals.rate(fleet.now) * window
        mean = max(1.0, idle / len(fleet.instances))
        return max((taken + expected) / (self._target * mean), pages / PAGES)


def _promises(instance: InstanceView, now: float, window: float, prompt: int) -> tuple[float, float, float]:
    """Return the idle budget of an instance, what is taken of it, and the share of its pages in use."""
    view = instance.view(now, max(now, instance.ends))
    idle = max(1.0, idle_budget(view.perf, window, prompt, view.limits.tokens))
    left = Promised(view).budget(view.start + window, prompt)
    return idle, min(MOST * idle, max(0.0, idle - left)), 1.0 - view.free_pages / max(1, view.limits.pages)
