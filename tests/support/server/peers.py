"""Cases of other servers' suites, in our words, and where this server does something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., None])


class Differs(NamedTuple):
    """What a peer does, and what this server does instead. The guide of clients lists them all."""

    peer: str
    there: str
    here: str


class Case(NamedTuple):
    """A request of a peer's test, and what the answer must have."""

    suite: str  # the peer and its file
    path: str
    body: dict[str, Any]
    status: int = 200
    has: dict[str, Any] = {}  # noqa: RUF012 - a default of a tuple; dotted names -> a value or a test of it
    differs: Differs | None = None


def differs(peer: str, there: str, here: str) -> Callable[[F], F]:
    """Say of a test what `Differs` says of a case."""
    return lambda test: test


def found(answer: Any, name: str) -> Any:
    """Return a value within an answer by its dotted name."""
    for part in name.split("."):
        answer = answer[int(part)] if isinstance(answer, list) else answer[part]
    return answer


def missing(answer: Any, has: dict[str, Any]) -> list[str]:
    """Return the names of values that are not as they must be."""
    return [name for name, wanted in has.items() if not _holds(found(answer, name), wanted)]


def _holds(value: Any, wanted: Any | Callable[[Any], bool]) -> bool:
    return bool(wanted(value)) if callable(wanted) else value == wanted
