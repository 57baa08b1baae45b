"""The settings of `--hf-overrides`: the keys of a config.json that turn a decoder into a scorer, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import InvalidValue
from jaxserve.yamlio import check_fields

NAME = "hf_overrides"


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that replace those of config.json. Raises InvalidValue naming the key, its value and what is allowed."""

    architectures: tuple[str, ...] = ()
    classifier_from_token: tuple[str, ...] = ()  # the tokens for "no" and "yes"
    is_original_qwen3_reranker: bool = False

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        if self.architectures not in ((), ("Qwen3ForCausalLM",), ("Qwen3ForSequenceClassification",)):
            raise InvalidValue(
                f"architectures={list(self.architectures)!r} must be ['Qwen3ForSequenceClassification']: only the keys "
                "of a Qwen3 reranker can be overridden",
                NAME,
            )
