"""Checks of submitted requests, and the description of a failure's cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from jaxserve.engine.programs.inputs import check_adjusted
from jaxserve.engine.runtime.info import EngineInfo
from jaxserve.sched.api.errors import InvalidValue, short
from jaxserve.sched.api.new_request import check_length
from jaxserve.sched.api.params import SamplingParams


def check_request(info: EngineInfo, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidValue, naming the field, if a request cannot be served."""
    if params.pooling is None and not info.generates:
        raise InvalidValue(
            f"model {info.model} has no output head, so it gives vectors only: ask /v1/embeddings, /pooling or "
            "/v1/score, or LLM.embed",
            "model",
        )
    check_length(len(prompt), info.max_model_len)
    if params.min_tokens or params.logit_bias:
        check_adjusted(params, tuple(info.eos))
    wrong = [token for token in prompt if not 0 <= token < info.vocab_size]
    if wrong:
        raise InvalidValue(f"token id {wrong[0]} must be between 0 and {info.vocab_size - 1}", "prompt")
    wrong = [token for token, _ in params.logit_bias if not 0 <= token < info.vocab_size]
    if wrong:
        raise InvalidValue(
            f"logit_bias of token {wrong[0]}: token ids must be between 0 and {info.vocab_size - 1}", "logit_bias"
        )
    for name, tokens in (
        ("allowed_token_ids", _ends(params.allowed_token_ids or ())),
        ("bad_words_token_ids", chain.from_iterable(params.bad_words_token_ids)),
    ):
        outside = next((token for token in tokens if not 0 <= token < info.vocab_size), None)
        if outside is not None:
            raise InvalidValue(f"{name}: token id {outside} must be between 0 and {info.vocab_size - 1}", name)
    unknown = next((name for name, _ in params.logits_processors if name not in info.logits_processors), None)
    if unknown is not None:
        allowed = ", ".join(info.logits_processors) or "none: start it with --logits-processors"
        raise InvalidValue(
            f"logits_processors={short(unknown)} is not one of this server's ({allowed})", "logits_processors"
        )
    if params.bad_words and not params.bad_words_token_ids:
        raise InvalidValue("bad_words needs bad_words_token_ids: see generation.bad_words", "bad_words")


def _ends(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the least and the greatest of many ids."""
    return (min(tokens), max(tokens)) if tokens else ()


def cause(error: BaseException) -> str:
    """Describe the errors behind an error; exception groups are replaced by their members."""
    return "; ".join(dict.fromkeys(f"{type(leaf).__name__}: {leaf}" for leaf in _leaves(error)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for exception in error.exceptions:
            yield from _leaves(exception)
    else:
        yield error
