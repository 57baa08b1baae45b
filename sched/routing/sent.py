"""Requests that a router sent and that the fleet does not show yet."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.request import Request, State
from .base import Fleet


class Sent:
    """Requests on their way, with their instance. Writer: the router that sends them."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, Request]] = []

    def add(self, index: int, request: Request) -> None:
        self._sent.append((index, request))

    def unseen(self, fleet: Fleet) -> Iterator[tuple[int, Request]]:
        """Yield (instance, request) for requests that do not show on their instance yet.

        Forgets requests that do, that have finished, or that have their first token; and all if the
        fleet shows what was sent.
        """
        if fleet.shows_sent:
            self._sent.clear()
        seen = {
            index: {instance.id for instance in fleet.instances[index]} for index in {index for index, _ in self._sent}
        }
        self._sent = [
            (index, request)
            for index, request in self._sent
            if request.id not in seen[index] and not request.generated and request.state is not State.FINISHED
        ]
        yield from self._sent
