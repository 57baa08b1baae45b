"""Settings of the HTTP server, the base of `ServeConfig`, and `flag`, which declares a setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxserve.errors import InvalidValue
from jaxserve.yamlio import size

Bytes = Annotated[int, size]


def flag(default: Any, group: str, text: str, **more: Any) -> Any:
    """Declare a setting: its default, the group of flags it is shown in, and what it does. `secret`: not in `repr`."""
    secret = more.pop("secret", False)
    return field(default=default, repr=not secret, metadata={"group": group, "help": text, **more})


@dataclass(frozen=True)
class HttpSettings:
    """Where the server listens, which keys it asks for, and what it bounds. Times in seconds.

    Keys are also read from JAXSERVE_API_KEY and JAXSERVE_ADMIN_KEY: see `server/keys.py`.
    """

    host: str = flag(
        "127.0.0.1", "server", "Address to listen on; 0.0.0.0 lets other machines connect (set --api-key then)."
    )
    port: int = flag(8000, "server", "Port to listen on; 0 picks a free one.")
    api_key: tuple[str, ...] = flag(
        (), "server", "Keys that requests must bring as `Authorization: Bearer KEY`, called key-1, key-2 ... in "
        "metrics. Other users of the machine can read flags: prefer --api-key-file or the variable JAXSERVE_API_KEY.",
        metavar="KEY", secret=True,
    )  # fmt: skip
    api_key_file: str | None = flag(
        None, "server", "File with a key on each line, or a name, a space and a key. Several keys of one name are one "
        "client: they share limits, metrics and prefix cache.", metavar="FILE",
    )  # fmt: skip
    admin_key: tuple[str, ...] = flag(
        (), "server", "Keys of the routes below /v1/admin, which are off without one. Also the variable "
        "JAXSERVE_ADMIN_KEY.", metavar="KEY", secret=True,
    )  # fmt: skip
    protect_metrics: bool = flag(
        False, "server", "Ask for a key on every route but /health: also on /metrics, /docs, /openapi.json, /load and "
        "/version.",
    )  # fmt: skip
    limits: str | None = flag(
        None, "server", "YAML file with limits of each API key: requests at a time, share of the queue, tokens per "
        "second, weight, and whether priority and which tiers it may ask for (docs/guide/security.md).", metavar="FILE",
    )  # fmt: skip
    served_model_name: tuple[str, ...] = flag(
        (), "server", "Names that requests may give as `model`. Default: the model's.", metavar="NAME"
    )
    chat_template: str | None = flag(None, "server", "Jinja file with a chat template instead of the model's.")
    max_body_size: Bytes = flag(8 << 20, "server", "Largest request body; larger ones get 413.", metavar="SIZE")
    max_header_size: Bytes = flag(
        64 << 10, "server", "Largest request line and headers; larger ones get 431.", metavar="SIZE"
    )
    header_timeout: float = flag(
        10.0, "server", "How long a client may take for the headers of a request; then 408.", metavar="TIME"
    )
    body_timeout: float = flag(60.0, "server", "The same for the body.", metavar="TIME")
    max_connections: int = flag(
        4096, "server", "Connections at a time; further ones get 503. Fewer where the process may open fewer files.",
        metavar="N",
    )  # fmt: skip
    drain_timeout: float = flag(
        30.0, "server", "After SIGTERM, how long running requests may go on; new ones get 503.", metavar="TIME"
    )
    pace_tokens: bool = flag(
        False, "server", "Stream tokens that are computed early no earlier than their objective asks for (first token "
        "plus TPOT each), as a steady flow instead of bursts. A request's own pace_tokens wins.",
    )  # fmt: skip
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "server", "How much to log.")
    disable_log_stats: bool = flag(False, "server", "No line of statistics every 10 s.")
    journal: str | None = flag(
        None, "server", "File that records arrivals, plans and results as JSON lines, to replay them.", metavar="FILE"
    )

    def check_http(self) -> None:
        """Raise InvalidValue for what cannot be a setting of the server."""
        for name, low in (
            ("max_body_size", 1),
            ("max_header_size", 1024),
            ("header_timeout", 0.1),
            ("body_timeout", 0.1),
            ("max_connections", 1),
            ("drain_timeout", 0),
        ):
            if getattr(self, name) < low:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be at least {low}", name)
        for name in ("api_key", "admin_key"):
            for key in getattr(self, name):
                check_key(key, name)


def check_key(key: str, name: str) -> None:
    """Raise InvalidValue for a key that no client could send, or that every client can: the empty one."""
    if not key:
        raise InvalidValue(f"{name} is empty, and would let everyone in: is a variable unset?", name)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidValue(f"{name}: a key must be printable ASCII characters without spaces", name)
