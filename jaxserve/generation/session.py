"""Names of sessions: the turns of a session find each other's pages in the prefix cache (sched SessionPins)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b

from jaxserve.errors import InvalidValue, short

FIELD, HEADER = "session_id", "x-session-id"
MAX_SESSION = 256  # characters


def session_of(client: str, field: str | None, headers: Mapping[str, str]) -> str:
    """Return the engine's name of a client's session; "" without one. The field takes precedence over the header.

    Clients that choose the same name have different sessions. Raises InvalidValue that names the field or the
    header unless it has 1 to MAX_SESSION characters.
    """
    param, given = (FIELD, field) if field is not None else (HEADER, headers.get(HEADER))
    if given is None:
        return ""
    if not 1 <= len(given) <= MAX_SESSION:
        raise InvalidValue(f"{param}={short(given)} must be a string of 1 to {MAX_SESSION} characters", param)
    return blake2b(json.dumps([client, given]).encode(), digest_size=16, person=b"jaxserve session").hexdigest()
