"""Salts of the prefix cache: requests with different salts share no page."""

from __future__ import annotations

import json
from hashlib import blake2b

from jaxserve.errors import InvalidValue, short

MAX_SALT = 1024  # characters of `cache_salt`


def check_salt(given: object) -> None:
    """Raises InvalidValue where a `cache_salt` is no text of 1 to MAX_SALT characters."""
    if not (isinstance(given, str) and 1 <= len(given) <= MAX_SALT):
        raise InvalidValue(f"cache_salt={short(given)} must be a text of 1 to {MAX_SALT} characters", "cache_salt")


def salt_of(client: str, cache_salt: str | None) -> bytes:
    """Return the salt of the pages of a client's request; empty where neither is given, and all requests share it."""
    if not client and cache_salt is None:
        return b""
    return blake2b(json.dumps([client, cache_salt]).encode(), digest_size=16, person=b"jaxserve salt").digest()
