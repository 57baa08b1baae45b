"""The settings of `--speculative-config`, with vLLM's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxserve.errors import InvalidValue
from jaxserve.yamlio import Range, check_fields

MOST = 15  # drafted tokens: decode attention kernels take 16 tokens per row
NAME = "speculative_config"


@dataclass(frozen=True, slots=True)
class Speculative:
    """Settings of speculative decoding. Raises InvalidValue naming the key, its value and what is allowed.

    num_speculative_tokens: most tokens that a row drafts in a step.
    adaptive (not in vLLM): choose the draft length from acceptance and step times, down to no draft;
    otherwise always draft the most.
    prompt_lookup_*: number of tokens that must match, for ngram. If one is missing it equals the
    other; if both are missing, 5.
    rejection_sample_method: see engine/programs/speculate.py.
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: Annotated[int, Range(1, MOST)]
    model: str | None = None  # the draft model
    revision: str | None = None  # of the draft model, on the Hub
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    rejection_sample_method: Literal["strict", "probabilistic"] = "strict"
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        if (self.model is None) != (self.method == "ngram"):
            wanted = "needs a model: a folder or a name on the Hub" if self.model is None else "takes no model"
            raise InvalidValue(f"method={self.method!r} {wanted}; model={self.model!r}", NAME)
        least, most = self.lookup
        if not 1 <= least <= most:
            raise InvalidValue(
                f"prompt_lookup_min={self.prompt_lookup_min!r} and prompt_lookup_max={self.prompt_lookup_max!r} must "
                "be at least 1, and the minimum at most the maximum",
                NAME,
            )
        if self.method == "ngram" and self.rejection_sample_method != "strict":
            raise InvalidValue(
                f"rejection_sample_method={self.rejection_sample_method!r} makes no difference to method='ngram', "
                "which has deterministic drafts; allowed: strict",
                NAME,
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """prompt_lookup_min and prompt_lookup_max, with defaults."""
        given = [bound for bound in (self.prompt_lookup_min, self.prompt_lookup_max) if bound is not None] or [5]
        least = given[0] if self.prompt_lookup_min is None else self.prompt_lookup_min
        return least, given[0] if self.prompt_lookup_max is None else self.prompt_lookup_max
