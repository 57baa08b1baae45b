"""One color and marker for each policy, in every plot, and free ones for whatever else a plot compares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

OWN = "unified"  # stands first in legends and wide tables
# The first eight are those of Okabe and Ito, which the color-blind tell apart.
POLICIES = {
    "unified": "#0072B2",
    "kairos": "#D55E00",
    "flowprefill": "#009E73",
    "fairbatching": "#CC79A7",
    "slos_serve": "#E69F00",
    "sarathi": "#56B4E9",
    "distserve": "#000000",
    "vllm": "#8C6D31",
    "deflection": "#5D3A9B",
    "edf": "#7F7F7F",
    "sjf": "#882255",
    "fcfs": "#44AA99",
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
BOUND = "#7F7F7F"  # what no policy can exceed
_WORDS = {re.sub("[^a-z]", "", name): name for name in POLICIES} | {"fb": "fairbatching"}  # as in its paper


class Style(NamedTuple):
    """How a name is drawn. variant: 0 for the first form of a policy in a plot, 1 for the second, and so on."""

    color: str
    marker: str
    variant: int = 0


def policy_of(name: str) -> str | None:
    """Return the policy that a label begins with: `kairos` of `kairos:literal`, `SLOs-Serve` or `Kairos, repaired`."""
    letters = re.sub("[^a-z]", "", name.lower())
    word = max((word for word in _WORDS if letters.startswith(word)), key=len, default=None)
    return None if word is None else _WORDS[word]


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name. Forms of one policy share its color; other names get colors that are free."""
    names = list(names)
    known = {name: policy for name in names if (policy := policy_of(name)) is not None}
    free = [policy for policy in POLICIES if policy not in known.values()]
    by_name: dict[str, Style] = {}
    seen: dict[str, int] = {}
    others = 0
    order = list(POLICIES)
    for name in names:
        policy = known.get(name)
        if name == "bound":
            by_name[name] = Style(BOUND, "")
        elif policy is None:
            policy = (free or order)[others % len(free or order)]
            by_name[name] = Style(POLICIES[policy], MARKERS[order.index(policy)])
            others += 1
        else:
            variant = seen.get(policy, 0)
            place = order.index(policy) + variant
            by_name[name] = Style(POLICIES[policy], MARKERS[place % len(MARKERS)], variant)
            seen[policy] = variant + 1
    return by_name


def own_first(names: Iterable[str]) -> list[str]:
    """Return the names with the forms of `unified` first, otherwise in their order."""
    return sorted(names, key=lambda name: policy_of(name) != OWN)
