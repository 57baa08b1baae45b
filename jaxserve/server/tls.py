"""TLS of the server: its certificate, its key, and the authorities of clients."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidValue
from jaxserve.settings.operations import OperationSettings

TLS_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def tls_of(settings: OperationSettings) -> dict[str, Any]:
    """Return uvicorn's arguments, {} for plain HTTP."""
    if settings.ssl_certfile is None:
        return {}
    return {name: getattr(settings, name) for name in (*TLS_FILES, "ssl_cert_reqs")}


def check_tls(settings: OperationSettings) -> None:
    """Raise InvalidValue that names the setting and the file if the files cannot be used."""
    if settings.ssl_certfile is None:
        return
    for name in TLS_FILES:
        path = getattr(settings, name)
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise InvalidValue(f"{name}={path!r} cannot be read: {error.strerror}", name) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = settings.ssl_keyfile
    try:
        # The empty password refuses an encrypted key, for which a server would ask on the terminal.
        context.load_cert_chain(settings.ssl_certfile, key, password="")  # nosec B106
    except ssl.SSLError as error:
        what = "" if key is None else f" with ssl_keyfile={key!r}"
        raise InvalidValue(
            f"ssl_certfile={settings.ssl_certfile!r}{what} is not a PEM certificate and its private key without a "
            f"passphrase: {error.reason or error}",
            "ssl_certfile" if key is None else "ssl_keyfile",
        ) from error
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except ssl.SSLError as error:
            message = f"ssl_ca_certs={settings.ssl_ca_certs!r} has no PEM certificate: {error.reason or error}"
            raise InvalidValue(message, "ssl_ca_certs") from error
