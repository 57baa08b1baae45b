"""Per-client limits, read from the YAML file that `--limits` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from jaxserve.errors import InvalidValue, short
from jaxserve.server.failures import Refused
from jaxserve.server.openai import Scheduled
from jaxserve.settings.fields import HttpSettings
from jaxserve.yamlio import Count, Range, check_fields, load_yaml, nearest


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The limits of one client. A request counts once per output: prompts times n."""

    max_concurrency: Count | None = None  # requests in the engine at a time; others wait. None: no limit
    queue_share: Annotated[float, Range(0, 1)] = 1.0  # of the admission queue that its waiting requests may fill
    tokens_per_second: Annotated[float, Range(0.001)] | None = None  # prompt plus output, on average; None: no limit
    weight: Annotated[float, Range(0.001, 1000)] = 1.0  # share of the engine under overload, relative to other clients
    priority: bool = True  # whether the client may set `priority`
    tiers: tuple[str, ...] | None = None  # allowed values of `service_tier`; None: all

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, body: Scheduled) -> None:
        """Raise Refused (403) if a body sets a field that this client may not set."""
        if body.priority is not None and not self.priority:
            raise Refused(403, "this API key may not set priority: leave it out", "priority", "not_allowed")
        if body.service_tier is not None and self.tiers is not None and body.service_tier not in self.tiers:
            there = ", ".join(self.tiers) or "none"
            message = f"this API key may not set service_tier={short(body.service_tier)}; allowed: {there}"
            raise Refused(403, message, "service_tier", "not_allowed")


@dataclass(frozen=True, slots=True)
class ClientLimitsFile:
    """The contents of the limits file: limits by key name, and the default for all other keys."""

    default: ClientLimits = ClientLimits()
    keys: Mapping[str, ClientLimits] = field(default_factory=dict)

    def of(self, client: str) -> ClientLimits:
        return self.keys.get(client, self.default)


def load_limits(settings: HttpSettings, names: tuple[str, ...]) -> ClientLimitsFile:
    """Read the file that `--limits` names. Raises InvalidValue with file and line.

    `names` are the clients of the configured API keys.
    """
    if settings.limits is None:
        return ClientLimitsFile()
    path = Path(settings.limits)
    if not path.is_file():
        raise InvalidValue(f"limits={str(path)!r} does not exist: docs/guide/security.md has an example", "limits")
    limits = load_yaml(path, ClientLimitsFile)
    for name in limits.keys:
        if name not in names:
            hint = nearest(name, names) if names else "there are no keys; name them in --api-key-file"
            raise InvalidValue(f"{path}: no API key is called {name!r}: {hint}", "limits")
    return limits
