"""The settings of `--kv-events-config`, with vLLM's keys and defaults."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from jaxserve.errors import InvalidValue
from jaxserve.yamlio import Count, Range, check_fields

NAME = "kv_events_config"
_ENDPOINT = re.compile(r"(tcp://[^/]+:(?P<port>\d{1,5})|ipc://.+|inproc://.+)")


@dataclass(frozen=True, slots=True)
class KVEvents:
    """Where events of prefix caches are published. Raises InvalidValue naming the key and what is allowed.

    endpoint, replay_endpoint: of the first instance; the port grows by one for each further one, as with
    vLLM's data-parallel ranks. buffer_steps: batches that can be asked for again. hwm: batches kept for a slow
    subscriber. max_queue_size: accepted for vLLM's sake; batches are sent at once. first_rank (not in vLLM): the
    rank of this engine's first instance; replicas get theirs from the server.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000
    topic: str = ""
    first_rank: Annotated[int, Range(0)] = 0

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            given = getattr(self, name)
            match = given if given is None else _ENDPOINT.fullmatch(given)
            if given is not None and (match is None or int(match["port"] or 0) > 65535):
                raise InvalidValue(f"{name}={given!r} must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH", NAME)
        check_fields(self, NAME)

    @property
    def published(self) -> bool:
        """Whether events are sent; vLLM's default publisher is zmq once events are enabled."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of(self, rank: int) -> tuple[str, str | None]:
        """Return the endpoint and the replay endpoint of an instance."""
        return _shifted(self.endpoint, rank), self.replay_endpoint and _shifted(self.replay_endpoint, rank)


def _shifted(endpoint: str, rank: int) -> str:
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://"):
        return f"{head}:{int(port) + rank}" if int(port) else endpoint
    return f"{endpoint}_dp{rank}" if rank else endpoint


def ranked(settings: KVEvents, first: int) -> str:
    """Return the JSON of the settings of an engine whose first instance has this rank."""
    return json.dumps(asdict(replace(settings, first_rank=first)))
