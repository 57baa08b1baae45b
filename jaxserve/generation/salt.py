"""Salts of the prefix cache: requests with different salts share no pages."""

from __future__ import annotations

import json
from hashlib import blake2b

from jaxserve.errors import InvalidValue, short

MAX_SALT = 1024  # characters of `cache_salt`


def check_salt(given: object) -> None:
    """Raise InvalidValue if a `cache_salt` is not a string of 1 to MAX_SALT characters."""
    if not (isinstance(given, str) and 1 <= len(given) <= MAX_SALT):
        raise InvalidValue(f"cache_salt={short(given)} must be a string of 1 to {MAX_SALT} characters", "cache_salt")


def salt_of(client: str, cache_salt: str | None) -> bytes:
    """Return the salt of a client's pages; without client and salt it is empty, and all share pages."""
    if not client and cache_salt is None:
        return b""
    return blake2b(json.dumps([client, cache_salt]).encode(), digest_size=16, person=b"jaxserve salt").digest()
