"""What a router has sent and its picture of the instances does not show yet."""

from __future__ import annotations

from collections.abc import Iterator

from ..api.request import Request, State
from .base import Fleet


class Sent:
    """Requests on their way, by the instance that they were sent to. Writer: the router that sends."""

    def __init__(self) -> None:
        self._sent: list[tuple[int, Request]] = []

    def add(self, index: int, request: Request) -> None:
        self._sent.append((index, request))

    def unseen(self, fleet: Fleet) -> Iterator[tuple[int, Request]]:
        """Those that their instance is not known to have; who is known to, is over, or has its first token is
        forgotten."""
        seen = {index: {one.id for one in fleet.instances[index]} for index in {index for index, _ in self._sent}}
        self._sent = [
            (index, request)
            for index, request in self._sent
            if request.id not in seen[index] and not request.generated and request.state is not State.FINISHED
        ]
        yield from self._sent
