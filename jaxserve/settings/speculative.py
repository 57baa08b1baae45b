"""What `--speculative-config` says: who drafts, how much, and how drafts are judged. Keys are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.errors import InvalidValue
from jaxserve.yamlio import parse_yaml

MOST = 15  # drafted tokens: attention kernels for decoding take 16 tokens of a row
NAME = "speculative_config"


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculation of a server. Raises InvalidValue naming the key, its value and what is allowed.

    num_speculative_tokens: most that a row drafts in a step. adaptive (ours): the length follows what was accepted and
    what steps take, down to none; otherwise it is always the most. prompt_lookup_*: tokens that must agree, for ngram;
    one that is not given is the other, and 5 where neither is. rejection_sample_method: see
    engine/programs/speculate.py.
    """

    method: Literal["ngram", "draft_model"]
    num_speculative_tokens: int
    model: str | None = None  # the draft model
    revision: str | None = None  # of it, on the Hub
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    rejection_sample_method: Literal["strict", "probabilistic"] = "strict"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MOST:
            raise InvalidValue(f"num_speculative_tokens={self.num_speculative_tokens} must be 1 to {MOST}", NAME)
        if (self.model is None) != (self.method == "ngram"):
            wanted = "needs a model: a folder or a name on the Hub" if self.model is None else "takes no model"
            raise InvalidValue(f"method={self.method!r} {wanted}; model={self.model!r}", NAME)
        least, most = self.lookup
        if not 1 <= least <= most:
            raise InvalidValue(
                f"prompt_lookup_min={self.prompt_lookup_min!r} and prompt_lookup_max={self.prompt_lookup_max!r} must "
                "be 1 or more, and the least no more than the most",
                NAME,
            )
        if self.method == "ngram" and self.rejection_sample_method != "strict":
            raise InvalidValue(
                f"rejection_sample_method={self.rejection_sample_method!r} makes no difference to method='ngram', "
                "whose drafts are not drawn; allowed: strict",
                NAME,
            )

    @property
    def lookup(self) -> tuple[int, int]:
        """prompt_lookup_min and prompt_lookup_max."""
        given = [one for one in (self.prompt_lookup_min, self.prompt_lookup_max) if one is not None] or [5]
        least = given[0] if self.prompt_lookup_min is None else self.prompt_lookup_min
        return least, given[0] if self.prompt_lookup_max is None else self.prompt_lookup_max


def parse(text: str | Mapping[str, Any]) -> Speculative:
    """From JSON, as on a command line, or from a mapping. Raises InvalidValue."""
    source = text if isinstance(text, str) else json.dumps(dict(text))
    try:
        return parse_yaml(source, Speculative, NAME)
    except InvalidValue as error:
        raise InvalidValue(str(error), NAME) from error
