"""Any policy whose rows decode one token each, made to draft: as `kairos/draft`."""

from __future__ import annotations

from dataclasses import replace

from ..policy import Decision, Grant, Policy, Role, View


class Drafting:
    """What `policy` decides, with drafts for the rows that decode: always limits.draft tokens."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, view: View) -> Decision:
        decision = self._policy.decide(view)
        if view.role is Role.PREFILL or not view.limits.draft or not len(view.decode):
            return decision
        rows = {one.id for one in view.decode}
        count = sum(grant.request in rows for grant in decision.grants)
        room = view.limits.tokens - sum(grant.tokens for grant in decision.grants if grant.request not in rows)
        draft = min(view.limits.draft, max(0, room // max(1, count) - 1))
        if not draft:
            return decision
        grants = tuple(
            Grant(grant.request, grant.tokens, draft) if grant.request in rows and not grant.draft else grant
            for grant in decision.grants
        )
        return replace(decision, grants=grants)
