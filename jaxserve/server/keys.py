"""API keys, read from flags, a file and the environment, and kept as digests with the client's name."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from jaxserve.errors import InvalidValue
from jaxserve.generation.sharing import salt_of
from jaxserve.settings.fields import HttpSettings, check_key

logger = logging.getLogger("jaxserve.server")

API_KEY, ADMIN_KEY = "JAXSERVE_API_KEY", "JAXSERVE_ADMIN_KEY"  # environment variables
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_NAME = re.compile(r"(?!key-\d+$)[A-Za-z0-9_.-]{1,64}")  # key-N is reserved for keys without a name


class Keys:
    """The digests of the API keys with their client names, and those of the admin keys.

    The keys themselves are not kept. Digests are keyed with a secret of this process, so that the
    timing of a lookup reveals nothing about a key.
    """

    def __init__(self, named: Iterable[tuple[str, str]], admin: Iterable[str] = ()) -> None:
        """Store digests of the `named` pairs (name, key) and of the admin keys.

        Raises InvalidValue if a key has two names or is also an admin key.
        """
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        for name, key in named:
            if self._names.setdefault(self._digest(key), name) != name:
                raise InvalidValue(f"an API key has two names, one of them {name!r}: give each name its own", "api_key")
        self._admin = {self._digest(key) for key in admin}
        if self._admin & self._names.keys():
            raise InvalidValue("admin_key is also an API key: use a different key for administration", "admin_key")

    @classmethod
    def of(cls, settings: HttpSettings, environment: Mapping[str, str] = os.environ) -> Keys:
        """Read the keys from settings and environment. Raises InvalidValue; its message never contains a key."""
        keys = cls(_named(settings, environment), _admin(settings, environment))
        if settings.protect_metrics and not keys.names:
            raise InvalidValue("protect_metrics needs --api-key, --api-key-file or JAXSERVE_API_KEY", "protect_metrics")
        return keys

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct client names; empty if no key is required."""
        return tuple(dict.fromkeys(self._names.values()))

    @property
    def has_admin(self) -> bool:
        return bool(self._admin)

    def client(self, key: str) -> str | None:
        """Return the name of the client with this key; None for an unknown key."""
        return self._names.get(self._digest(key))

    def is_admin(self, key: str) -> bool:
        return self._digest(key) in self._admin

    def salt(self, client: str, cache_salt: str | None) -> bytes:
        """Return the salt of a request's pages in the prefix cache; empty if the request shares with all others.

        Requests of different clients never share pages, nor do requests with different `cache_salt`.
        """
        return salt_of(client if len(self.names) > 1 else "", cache_salt)

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode("utf-8", "surrogateescape"), key=self._secret, digest_size=32).digest()


def _named(settings: HttpSettings, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    given = list(settings.api_key)
    if API_KEY in environment:
        check_key(environment[API_KEY], API_KEY)
        given.append(environment[API_KEY])
    for number, key in enumerate(dict.fromkeys(given), 1):
        yield f"key-{number}", key
    if settings.api_key_file is not None:
        yield from _of_file(Path(settings.api_key_file), len(set(given)))


def _admin(settings: HttpSettings, environment: Mapping[str, str]) -> Iterator[str]:
    yield from settings.admin_key
    if ADMIN_KEY in environment:
        check_key(environment[ADMIN_KEY], ADMIN_KEY)
        yield environment[ADMIN_KEY]


def _of_file(path: Path, before: int) -> Iterator[tuple[str, str]]:
    """Read lines `KEY` or `NAME KEY`; `#` begins a comment line. Unnamed keys are numbered from `before` + 1."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise InvalidValue(f"api_key_file={str(path)!r} cannot be read: {reason}", "api_key_file") from error
    keys = 0
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        keys += 1
        if len(words) > 2 or (len(words) == 2 and not _NAME.fullmatch(words[0])):
            raise InvalidValue(
                f"{path}:{number} must be a key, or a name of letters, digits, '.', '_' and '-' (not key-N), a space "
                "and a key",
                "api_key_file",
            )
        check_key(words[-1], f"{path}:{number}")
        yield words[0] if len(words) == 2 else f"key-{before + keys}", words[-1]
    if not keys:
        raise InvalidValue(f"api_key_file={str(path)!r} contains no key", "api_key_file")


def warn_if_open(settings: HttpSettings, keys: Keys) -> None:
    """Log a warning if other machines can connect without a key, or other users can read the key file."""
    file = settings.api_key_file
    if file is not None and Path(file).stat().st_mode & 0o077:
        logger.warning("api_key_file=%s can be read by other users of this machine: chmod 600 it", file)
    if not keys.names and settings.host not in LOOPBACK and not settings.host.startswith("127."):
        logger.warning(
            "host=%s lets other machines connect and no key is set: anyone who reaches port %d can use this server. "
            "Set --api-key-file, or --host 127.0.0.1.",
            settings.host,
            settings.port,
        )
