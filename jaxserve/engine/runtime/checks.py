"""Checks of submitted requests, and the description of a failure's cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxserve.engine.programs.inputs import check_adjusted
from jaxserve.engine.runtime.info import EngineInfo
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.request import check_prompt_length


def check_request(info: EngineInfo, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidValue, naming the field, if a request cannot be served."""
    check_prompt_length(len(prompt), info.max_model_len)
    check_adjusted(params, tuple(info.eos))
    wrong = [token for token in prompt if not 0 <= token < info.vocab_size]
    if wrong:
        raise InvalidValue(f"token id {wrong[0]} must be between 0 and {info.vocab_size - 1}", "prompt")
    wrong = [token for token, _ in params.logit_bias if not 0 <= token < info.vocab_size]
    if wrong:
        raise InvalidValue(
            f"logit_bias of token {wrong[0]}: token ids must be between 0 and {info.vocab_size - 1}", "logit_bias"
        )


def cause(error: BaseException) -> str:
    """Describe the errors behind an error; exception groups are replaced by their members."""
    return "; ".join(dict.fromkeys(f"{type(one).__name__}: {one}" for one in _leaves(error)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
