"""Policies by name, imported on demand.

A name is a whole policy (`kairos`), a policy with options (`kairos:literal`, `sarathi:tokens=512`),
or a prefill half and a decode half (`prefill=fcfs,decode=continuous`), each with options of its own.
The suffix `/draft` adds speculative drafting to any policy.
"""

from __future__ import annotations

from ..api.errors import InvalidValue
from ..api.policy import Policy
from ..registry import build, shared

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
    first, slash, drafts = text.strip().partition("/")
    if slash:
        drafting: Policy = build(DRAFTING, drafts, "drafting", __package__, policy=make(first))
        return drafting
    name, _, options = text.strip().partition(":")
    if name in HALVES:
        return _halves(*shared((PREFILL, DECODE), HALVES[name], options, f"policy {name!r}", "policy", __package__))
    if "=" in name:
        parts = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if set(parts) == {"prefill", "decode"}:
            return _halves(parts["prefill"], parts["decode"])
    if name not in WHOLE:
        raise InvalidValue(
            f"unknown policy {text!r}; choose one of {', '.join(names())}, or two halves as in "
            f"prefill={'|'.join(PREFILL)},decode={'|'.join(DECODE)}",
            "policy",
        )
    policy: Policy = build(WHOLE, text, "policy", __package__)
    return policy


def _halves(prefill: str, decode: str) -> Policy:
    from .halves import Halves

    return Halves(
        build(PREFILL, prefill, "prefill policy", __package__), build(DECODE, decode, "decode policy", __package__)
    )
