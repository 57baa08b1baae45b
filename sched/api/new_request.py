"""A request as it is handed to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from .errors import ContextOverflow, InvalidValue
from .params import SamplingParams
from .slo import SLO

STANDARD = "standard"  # the tier of requests that name none


class Progress(NamedTuple):
    """What another engine has done for a request before this one gets it, for example before it died."""

    output: tuple[int, ...]  # tokens that it has generated
    first: float = 0.0  # seconds since the first of them
    last: float = 0.0  # seconds since the last of them
    scored: int = 0  # prompt positions with reported log-probabilities


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request, made and checked where it arrives (the server or `LLM`), and the same value on every wire.

    The first fields are what was asked. Those from `waited` on are what has happened to it on its way, by a router.
    """

    prompt: Sequence[int]  # kept as a tuple; a simulation's may be a range, which no wire carries
    params: SamplingParams  # of one output
    slo: SLO
    priority: int = 0  # lower is earlier
    tier: str = STANDARD
    key: str = ""  # its name in logs and journals
    salt: bytes = b""  # the prefix cache only matches pages of requests with the same salt
    # Its pages stay in the prefix cache for the next request of the same name, within --session-timeout; "": none.
    session: str = ""
    client: str = ""  # name of the API key that it came with; "": none
    waited: float = 0.0  # seconds since its arrival
    # What another engine has done for it: only further tokens are delivered, and they are those that the other engine
    # would have generated if `params` has a seed or is greedy.
    progress: Progress | None = None
    handed_over: bool = False  # it ends after its first token, with reason "length": another engine continues it
    kv_from: str = ""  # where a KV source finds the KV of its prompt; "": nowhere
    kv_tokens: int = 0  # of its first tokens only; 0: of all

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, tuple | range):
            object.__setattr__(self, "prompt", tuple(self.prompt))

    def described(self) -> dict[str, Any]:
        """Return all fields but those that hold tokens of users, and the way here: what a journal records."""
        return {name: getattr(self, name) for name in _RECORDED}


def check_length(length: int, context: int, params: SamplingParams | None = None, param: str = "prompt") -> None:
    """Raise InvalidValue if a prompt is empty, or leaves no room for its output in a context of `context` tokens.

    params: None, if only one token of output is sure to be asked. param: the field that has the prompt.
    """
    output = 1 if params is None else params.max_tokens or 1
    if length == 0:
        raise InvalidValue("the prompt is empty: at least one token is needed", param)
    if length + output > context:
        raise ContextOverflow(context, length, output, param)


_RECORDED = [field.name for field in fields(NewRequest) if field.name not in ("prompt", "salt", "waited", "progress")]
