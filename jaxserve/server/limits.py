"""Limits of each client, from the YAML file of `--limits`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from jaxserve.errors import InvalidValue, short
from jaxserve.server.failures import Refused
from jaxserve.server.openai import Sampled
from jaxserve.settings.fields import HttpSettings
from jaxserve.yamlio import load_yaml, nearest


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may ask for. A request counts once for each of its outputs: prompts times n."""

    max_concurrency: int | None = None  # requests in the engine at a time; further ones wait. None: no limit
    queue_share: float = 1.0  # of the queue in front of the engine that its waiting requests may fill
    tokens_per_second: float | None = None  # prompt and output together, on average; None: no limit
    weight: float = 1.0  # share of the engine under overload, relative to other clients
    priority: bool = True  # whether it may set `priority`
    tiers: tuple[str, ...] | None = None  # values of `service_tier` that it may send; None: all

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_concurrency", 1, inf),
            ("queue_share", 0, 1),
            ("tokens_per_second", 0.001, inf),
            ("weight", 0.001, 1000),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                allowed = f"at least {low}" if high == inf else f"{low} to {high}"
                raise InvalidValue(f"{name}={value!r} must be {allowed}", name)

    def check(self, body: Sampled) -> None:
        """Raise Refused (403) where a body sets what this client may not."""
        if body.priority is not None and not self.priority:
            raise Refused(403, "this API key may not set priority: leave it out", "priority", "not_allowed")
        if body.service_tier is not None and self.tiers is not None and body.service_tier not in self.tiers:
            there = ", ".join(self.tiers) or "none"
            message = f"this API key may not ask for service_tier={short(body.service_tier)}; it may for {there}"
            raise Refused(403, message, "service_tier", "not_allowed")


@dataclass(frozen=True, slots=True)
class ClientLimitsFile:
    """The file: limits by name of the key, and those of all other keys."""

    default: ClientLimits = ClientLimits()
    keys: Mapping[str, ClientLimits] = field(default_factory=dict)

    def of(self, client: str) -> ClientLimits:
        """Return the limits of a client."""
        return self.keys.get(client, self.default)


def load_limits(settings: HttpSettings, names: tuple[str, ...]) -> ClientLimitsFile:
    """Read the file of `--limits`; `names` are the clients there are. Raises InvalidValue with file and line."""
    if settings.limits is None:
        return ClientLimitsFile()
    path = Path(settings.limits)
    if not path.is_file():
        raise InvalidValue(f"limits={str(path)!r} does not exist: docs/guide/security.md has an example", "limits")
    made = load_yaml(path, ClientLimitsFile)
    for name in made.keys:
        if name not in names:
            hint = nearest(name, names) if names else "there are no keys; name them in --api-key-file"
            raise InvalidValue(f"{path}: no API key is called {name!r}: {hint}", "limits")
    return made
