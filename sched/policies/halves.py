"""One policy for prompts and one for decoding, put together by the role of the instance."""

from __future__ import annotations

from ..policy import Decision, Policy, Role, View


class Halves:
    """Prompts first on a prefill instance; elsewhere decoding first and prompts in what the budget leaves."""

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        self._prefill = prefill
        self._decode = decode

    def decide(self, view: View) -> Decision:
        prefill = self._prefill.decide(view).grants if len(view.prefill) else ()
        decode = self._decode.decide(view).grants if len(view.decode) else ()
        return Decision(prefill + decode if view.role is Role.PREFILL else decode + prefill)
