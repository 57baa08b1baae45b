"""Which requests share pages of the prefix cache: salts keep requests apart, and sessions keep pages for later ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b

from jaxserve.errors import InvalidValue, short

MAX_SALT = 1024  # characters of `cache_salt`
FIELD, HEADER = "session_id", "x-session-id"
MAX_SESSION = 256  # characters


def check_salt(given: object) -> None:
    """Raise InvalidValue if a `cache_salt` is not a string of 1 to MAX_SALT characters."""
    if not (isinstance(given, str) and 1 <= len(given) <= MAX_SALT):
        raise InvalidValue(f"cache_salt={short(given)} must be a string of 1 to {MAX_SALT} characters", "cache_salt")


def salt_of(client: str, cache_salt: str | None) -> bytes:
    """Return the salt of a client's pages; without client and salt it is empty, and all share pages."""
    if not client and cache_salt is None:
        return b""
    return blake2b(json.dumps([client, cache_salt]).encode(), digest_size=16, person=b"jaxserve salt").digest()


def session_of(client: str, field: str | None, headers: Mapping[str, str]) -> str:
    """Return the engine's name of a client's session; "" without one. The field takes precedence over the header.

    Clients that choose the same name have different sessions. The turns of a session find each other's pages in the
    prefix cache (sched SessionPins). Raises InvalidValue that names the field or the header unless it has 1 to
    MAX_SESSION characters.
    """
    param, given = (FIELD, field) if field is not None else (HEADER, headers.get(HEADER))
    if given is None:
        return ""
    if not 1 <= len(given) <= MAX_SESSION:
        raise InvalidValue(f"{param}={short(given)} must be a string of 1 to {MAX_SESSION} characters", param)
    return blake2b(json.dumps([client, given]).encode(), digest_size=16, person=b"jaxserve session").hexdigest()
