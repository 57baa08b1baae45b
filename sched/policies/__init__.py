"""Policies by name, imported on demand.

A name is a whole policy (`kairos`), a policy with options (`kairos:literal`, `sarathi:tokens=512`),
or a prefill half and a decode half (`prefill=fcfs,decode=continuous`), each with options of its own.
A policy or a half may come from a file (`file:./mine.py:Mine`, see from_file.py). The suffix `/draft`
adds speculative drafting to any policy.
"""

from __future__ import annotations

from ..api.errors import InvalidValue
from ..api.policy import Policy
from ..registry import build, shared
from . import from_file
from .from_file import from_files, resolved, shown

__all__ = ["from_files", "make", "names", "resolved", "routing", "shown"]

PREFILL = {
    "deadline_edf": "edf:DeadlineEdf",
    "edf": "edf:Edf",
    "fcfs": "fcfs:Fcfs",
    "flowprefill": "flowprefill:FlowPrefill",
    "kairos": "kairos.prefill:KairosPrefill",
    "sedf": "sedf:Sedf",
    "sjf": "sjf:Sjf",
}
DECODE = {
    "continuous": "continuous:Continuous",
    "kairos": "kairos.decode:KairosDecode",
}
# A prefill half's own name is a whole policy too, with the decode half `continuous`.
HALVES = {name: (name, "continuous") for name in PREFILL if name != "fcfs"} | {
    "distserve": ("fcfs", "continuous"),
    "kairos": ("kairos", "kairos"),
}
WHOLE = {
    "fairbatching": "fairbatching:FairBatching",
    "sarathi": "sarathi:Sarathi",
    "slos_serve": "slos_serve.policy:SlosServe",
    "unified": "unified:Unified",
    "vllm": "prefill_first:PrefillFirst",
}

DRAFTING = {"draft": "drafting:Drafting"}
ROUTER = {"unified": "unified"}  # policies that are designed together with a router of their own


def names() -> list[str]:
    """List the policy names that `--policy` takes, without options and halves."""
    return sorted({*HALVES, *WHOLE})


def routing(policy: str, given: str = "auto") -> str:
    """Return the router that goes with a policy, unless `given` names one."""
    if given != "auto":
        return given
    return ROUTER.get(policy.partition(":")[0], "least_work")


def make(text: str) -> Policy:
    """Create a policy from its name. Raises InvalidValue, which names the allowed ones."""
    text = text.strip()
    slash = from_file.masked(text).find("/")
    if slash >= 0:
        drafting: Policy = build(DRAFTING, text[slash + 1 :], "drafting", __package__, policy=make(text[:slash]))
        return drafting
    if text.startswith(from_file.PREFIX):
        return from_file.make(text)
    name, _, options = text.partition(":")
    if name in HALVES:
        return _halves(*shared((PREFILL, DECODE), HALVES[name], options, f"policy {name!r}", "policy", __package__))
    if "=" in name:
        parts = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if set(parts) == {"prefill", "decode"}:
            return _halves(parts["prefill"], parts["decode"])
    if name not in WHOLE:
        raise InvalidValue(
            f"unknown policy {text!r}; choose one of {', '.join(names())}, two halves as in "
            f"prefill={'|'.join(PREFILL)},decode={'|'.join(DECODE)}, or a class of yours as in file:./mine.py:Mine",
            "policy",
        )
    policy: Policy = build(WHOLE, text, "policy", __package__)
    return policy


def _halves(prefill: str, decode: str) -> Policy:
    from .halves import Halves

    return Halves(_half(PREFILL, prefill, "prefill policy"), _half(DECODE, decode, "decode policy"))


def _half(table: dict[str, str], text: str, what: str) -> Policy:
    if text.startswith(from_file.PREFIX):
        return from_file.make(text, what)
    half: Policy = build(table, text, what, __package__)
    return half
