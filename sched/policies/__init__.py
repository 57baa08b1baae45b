"""Policies by name, imported on demand.

A name is a whole policy (`kairos`) or two halves (`prefill=fcfs,decode=continuous`).
"""

from __future__ import annotations

from importlib import import_module

from ..errors import InvalidValue
from ..policy import Policy

PREFILL = {
    "fcfs": "fcfs:Fcfs",
    "kairos": "kairos_prefill:KairosPrefill",
}
DECODE = {
    "continuous": "continuous:Continuous",
    "kairos": "kairos_decode:KairosDecode",
}
WHOLE = {
    "distserve": "prefill=fcfs,decode=continuous",
    "kairos": "prefill=kairos,decode=kairos",
}


def names() -> list[str]:
    """What `--policy` takes, halves aside."""
    return sorted(WHOLE)


def make(name: str) -> Policy:
    """A new policy. Raises InvalidValue naming what is allowed."""
    halves = dict(part.partition("=")[::2] for part in WHOLE.get(name, name).split(","))
    if set(halves) != {"prefill", "decode"}:
        raise InvalidValue(
            f"unknown policy {name!r}; choose one of {', '.join(names())}, or two halves as in "
            f"prefill={'|'.join(PREFILL)},decode={'|'.join(DECODE)}",
            "policy",
        )
    from .halves import Halves

    return Halves(_half(PREFILL, "prefill", halves["prefill"]), _half(DECODE, "decode", halves["decode"]))


def _half(table: dict[str, str], side: str, name: str) -> Policy:
    if name not in table:
        raise InvalidValue(f"unknown {side} policy {name!r}; choose one of {', '.join(sorted(table))}", "policy")
    module, _, factory = table[name].partition(":")
    policy: Policy = getattr(import_module(f".{module}", __package__), factory)()
    return policy
