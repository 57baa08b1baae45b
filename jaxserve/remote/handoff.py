"""Prefill and decode replicas: a request gets its first token on one, and continues on another.

The replica that decodes fetches the KV of the prompt from the one that prefills, page by page while
they are computed. If nothing arrives, it computes the prompt: which replicas there are, and what
they have, changes the time of a token and not the token. Every replica can do both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jaxserve.remote.client import RemoteEngine
from jaxserve.remote.messages import Submit
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role


def unfit(engines: Iterable[RemoteEngine], begun: bool) -> list[RemoteEngine]:
    """Return the engines whose role is not to begin requests, or to continue those that have begun."""
    other = Role.PREFILL if begun else Role.DECODE
    return [engine for engine in engines if all(role is other for role in engine.roles)]


def splits(request: Submit, engines: Collection[RemoteEngine], engine: RemoteEngine) -> bool:
    """Return whether an engine is to compute only the first token of a request, because others decode.

    Requests for log-probabilities of the prompt stay, since whatever continues them computes the whole prompt.
    """
    info = engine.info
    most = min(request.params.max_tokens or info.max_model_len, info.max_model_len - len(request.prompt))
    decoding = [one for one in engines if one.healthy and one not in unfit(engines, begun=True)]
    return (
        most > 1
        and not short(request, engine)
        and request.params.prompt_logprobs is None
        and engine.kv != ""
        and engine not in decoding
        and bool(decoding)
    )


def short(request: Submit, engine: RemoteEngine) -> bool:
    """Return whether a prompt has no whole page, so that there is nothing to hand over."""
    return len(request.prompt) < engine.info.instances[0].page_size


def check_replica_roles(roles: Iterable[Role]) -> None:
    """Raise InvalidValue if no replica of these roles would prefill, or none decode."""
    given = [role.value for role in roles]
    if set(given) in ({Role.PREFILL.value}, {Role.DECODE.value}):
        raise InvalidValue(f"roles={given} are incomplete: some replica must prefill and some must decode", "roles")
