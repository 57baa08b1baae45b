"""`OperationSettings`: what operators set about TLS, CORS, metrics, traces, profiles and cache events."""

from __future__ import annotations

import json
import re
import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from jaxserve.errors import InvalidValue, short
from jaxserve.settings.fields import HttpSettings, flag
from jaxserve.settings.kv_events import NAME, KVEvents
from jaxserve.yamlio import parse_setting

PREFIX = "jaxserve:"
_PREFIX = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_METHOD = re.compile(r"\*|[A-Z]+")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CERT_REQS = {
    int(requirement): requirement.name for requirement in (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)
}


@dataclass(frozen=True)
class OperationSettings(HttpSettings):
    """Settings of the surroundings of a server, with vLLM's names where vLLM has them."""

    ssl_keyfile: str | None = flag(
        None, "tls", "PEM file with the private key of --ssl-certfile, without a passphrase.", metavar="FILE"
    )
    ssl_certfile: str | None = flag(
        None, "tls", "PEM file with the server's certificate and those that it was signed with: serve HTTPS.",
        metavar="FILE",
    )  # fmt: skip
    ssl_ca_certs: str | None = flag(
        None, "tls", "PEM file of authorities whose certificates clients may present.", metavar="FILE"
    )
    ssl_cert_reqs: int = flag(
        0, "tls", "Whether clients must present a certificate: 0 no, 1 only a valid one if any, 2 yes. 1 and 2 "
        "need --ssl-ca-certs."
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = flag(
        (), "tls", "Origins of web pages that may call this server (CORS), as in https://chat.example.com; * "
        "allows all. vLLM's JSON list is taken too. Default: none.", metavar="ORIGIN",
    )  # fmt: skip
    allow_credentials: bool = flag(
        False, "tls", "Let pages of --allowed-origins send cookies and other credentials of the browser. API "
        "keys in the header Authorization do not need it.",
    )  # fmt: skip
    allowed_methods: tuple[str, ...] = flag(("*",), "tls", "HTTP methods that these pages may use.", metavar="METHOD")
    allowed_headers: tuple[str, ...] = flag(
        ("*",), "tls", "Request headers that these pages may send.", metavar="HEADER"
    )
    metrics_prefix: str = flag(
        PREFIX, "operations", "Prefix of all metrics. `vllm:` makes dashboards and gateways for vLLM work.",
        metavar="PREFIX",
    )  # fmt: skip

    otlp_traces_endpoint: str | None = flag(
        None, "operations", "URL of an OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP, "
        "as in http://localhost:4318/v1/traces. Needs the extra `otel`.", metavar="URL",
    )  # fmt: skip

    dashboard: bool = flag(
        True, "operations", "Serve a page at / that chats, shows what the instances do, and explains why a request was "
        "late; the engine records its last steps for it."
    )  # fmt: skip

    profile_dir: str | None = flag(
        None, "operations", "Folder for traces of the device and the host between POST /start_profile and "
        "/stop_profile (jax.profiler, for Perfetto and XProf).", metavar="PATH",
    )  # fmt: skip

    kv_events_config: str | None = flag(
        None, "operations", "Publish what prefix caches gain and lose by ZeroMQ, in vLLM's format, as JSON with vLLM's "
        "keys: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic. "
        "Needs the extra `events`.", metavar="JSON",
    )  # fmt: skip

    def check_operations(self) -> None:
        """Raise InvalidValue for settings that cannot be meant."""
        if _PREFIX.fullmatch(self.metrics_prefix) is None:
            allowed = "a letter, _ or :, then letters, digits, _ and :, as in vllm:"
            raise InvalidValue(f"metrics_prefix={self.metrics_prefix!r} must be {allowed}", "metrics_prefix")
        self._check_ssl()
        self._check_cors()
        _ = self.kv_events
        if self.otlp_traces_endpoint is not None:
            check_url(self.otlp_traces_endpoint, "otlp_traces_endpoint")

    def _check_ssl(self) -> None:
        if self.ssl_cert_reqs not in CERT_REQS:
            known = ", ".join(f"{number} ({name})" for number, name in CERT_REQS.items())
            raise InvalidValue(f"ssl_cert_reqs={self.ssl_cert_reqs!r} must be one of {known}", "ssl_cert_reqs")
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise InvalidValue(f"{name}={getattr(self, name)!r} needs ssl_certfile", name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise InvalidValue(f"ssl_cert_reqs={self.ssl_cert_reqs} needs ssl_ca_certs", "ssl_cert_reqs")

    def _check_cors(self) -> None:
        for origin in self.origins:
            if origin != "*":
                parts = urlsplit(origin)
                if not parts.scheme or not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
                    raise InvalidValue(
                        f"allowed_origins={short(origin)} must be * or SCHEME://HOST[:PORT] without a path, as in "
                        "https://chat.example.com",
                        "allowed_origins",
                    )
        if self.allow_credentials and "*" in self.origins:
            raise InvalidValue(
                "allow_credentials with allowed_origins=* would let every web page act for its visitors: name the "
                "origins",
                "allow_credentials",
            )
        for name, pattern, text in (
            ("allowed_methods", _METHOD, "* or methods in capital letters, as in POST"),
            ("allowed_headers", _HEADER, "* or names of headers"),
        ):
            for value in listed(getattr(self, name), name):
                if pattern.fullmatch(value) is None:
                    raise InvalidValue(f"{name}={short(value)} must be {text}", name)

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins`, with vLLM's JSON list taken apart."""
        return listed(self.allowed_origins, "allowed_origins")

    @cached_property
    def kv_events(self) -> KVEvents | None:
        """The parsed `kv_events_config`; None: no events."""
        given = self.kv_events_config
        return None if given is None else parse_setting(given, KVEvents, NAME)


def listed(given: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the values of a setting that may be one JSON list, as vLLM takes it. Raises InvalidValue."""
    if len(given) != 1 or not given[0].lstrip().startswith("["):
        return given
    try:
        values: Any = json.loads(given[0])
    except ValueError as error:
        raise InvalidValue(f"{name}={short(given[0])} is not valid JSON: {error}", name) from error
    if not all(isinstance(value, str) for value in values):
        raise InvalidValue(f"{name}={short(given[0])} must be a list of strings", name)
    return tuple(values)


def check_url(url: str, name: str, form: str = "http://HOST[:PORT]/PATH") -> None:
    """Raise InvalidValue for a URL that is not http or https with a host."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise InvalidValue(f"{name}={short(url)} must be {form} or https://...", name)
