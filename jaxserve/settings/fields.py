"""`HttpSettings`, the base of `ServeConfig`, and `flag`, which declares a setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from jaxserve.errors import InvalidValue
from jaxserve.settings.overrides import NAME as OVERRIDES
from jaxserve.settings.overrides import Overrides
from jaxserve.tools.families import REASONING_PARSERS, TOOL_PARSERS, Parsers
from jaxserve.yamlio import Bytes, Count, Range, Room, Seconds, check_fields, parse_setting


def flag(default: Any, group: str, text: str, **more: Any) -> Any:
    """Declare a setting: default, group of flags, help text. `secret`: not shown in `repr`."""
    secret = more.pop("secret", False)
    return field(default=default, repr=not secret, metadata={"group": group, "help": text, **more})


@dataclass(frozen=True)
class HttpSettings:
    """Settings of the HTTP server: address, keys and limits. Times in seconds.

    Keys are also read from JAXSERVE_API_KEY and JAXSERVE_ADMIN_KEY: see `server/keys.py`.
    """

    host: str = flag(
        "127.0.0.1", "http", "Address to listen on; 0.0.0.0 lets other machines connect (then set --api-key)."
    )
    port: Annotated[int, Range(0, 65535)] = flag(8000, "http", "Port to listen on; 0 picks a free one.")
    api_server_count: Annotated[int, Range(0, 64)] = flag(
        1, "replicas", "Processes for HTTP, tokenizing and detokenizing, beside the engine's own. 0: one process for "
        "all."
    )  # fmt: skip
    replicas: Count = flag(
        1, "replicas", "Engines of the whole --mesh, each in a process of its own. A request whose engine is lost "
        "continues on another one with the same tokens."
    )  # fmt: skip
    max_replicas: Count | None = flag(
        None, "replicas", "Most engines: more start with the load, and fewer run without it. --replicas is their "
        "number at the start. Default: their number stays."
    )  # fmt: skip
    min_replicas: Count | None = flag(None, "replicas", "Fewest engines with --max-replicas. Default: 1.")
    scaling: str = flag(
        "budget", "replicas", "Rule for the number of engines with --max-replicas: budget (prefill admission budgets "
        "and slack) or requests (unfinished requests per engine); with options, as in budget:target=0.5.",
        metavar="NAME",
    )  # fmt: skip
    downscale_delay: Seconds = flag(
        120.0, "replicas", "Time for which fewer engines must have been enough before one stops."
    )
    prefill_replicas: Count | None = flag(
        None, "replicas", "Engines that compute prompts and the first token, instead of --replicas; needs "
        "--decode-replicas.", metavar="P",
    )  # fmt: skip
    decode_replicas: Count | None = flag(
        None, "replicas", "Engines that take the KV of the prompt from a prefill replica and continue there.",
        metavar="D",
    )  # fmt: skip
    kv_transfer: Literal["auto", "direct", "host"] | None = flag(
        None, "kv-transfer", "How KV goes from one engine process to another. direct: from device to device, by "
        "jax.experimental.transfer. host: as bytes over the connection of the engines. auto: direct where both sides "
        "can, else host. Default: auto for prefill and decode replicas. With --replicas, prefix hits of other "
        "replicas are fetched if this is given.",
    )  # fmt: skip
    replica_routing: str = flag(
        "unified", "replicas", "Router that chooses the replica of a request, with options after a colon: any that "
        "--routing takes, except auto.", metavar="NAME",
    )  # fmt: skip
    ray: str | None = flag(
        None, "ray", "Place the engines in a Ray cluster: its HOST:PORT, ray://HOST:PORT, auto (the cluster of this "
        "machine), or local (starts one on this machine). Needs the extra `ray`.", metavar="ADDRESS",
    )  # fmt: skip
    api_key: tuple[str, ...] = flag(
        (), "keys", "Keys that requests must send as `Authorization: Bearer KEY`, called key-1, key-2, ... in "
        "metrics. Other users of the machine can see flags: prefer --api-key-file or the variable JAXSERVE_API_KEY.",
        metavar="KEY", secret=True,
    )  # fmt: skip
    api_key_file: str | None = flag(
        None, "keys", "File with one key per line, or a name, a space and a key. Keys with the same name are one "
        "client and share limits, metrics and prefix cache.", metavar="FILE",
    )  # fmt: skip
    admin_key: tuple[str, ...] = flag(
        (), "keys", "Keys of the routes for administrators (/v1/admin, /server_info, /reset_prefix_cache, profiles), "
        "which are disabled without one. Also the variable JAXSERVE_ADMIN_KEY.", metavar="KEY", secret=True,
    )  # fmt: skip
    protect_metrics: bool = flag(
        False, "keys", "Require a key on every route except probes: also on /metrics, /docs, /openapi.json, /load "
        "and /version.",
    )  # fmt: skip
    limits: str | None = flag(
        None, "keys", "YAML file with limits of each API key: concurrent requests, share of the queue, tokens per "
        "second, weight, and whether it may set priority and which tiers (docs/guide/security.md).", metavar="FILE",
    )  # fmt: skip
    served_model_name: tuple[str, ...] = flag(
        (), "chat", "Names of the model in requests. Default: the model's.", metavar="NAME"
    )
    generation_config: str = flag(
        "auto", "chat", "Sampling parameters of requests that set none: those of the model's generation_config.json "
        "(auto), of the one in a folder, or vLLM's defaults (vllm)."
    )  # fmt: skip
    chat_template: str | None = flag(None, "chat", "Jinja file of a chat template that replaces the model's.")
    hf_overrides: str | None = flag(
        None, "model", "Keys of config.json to override, as JSON. Only those of a Qwen3 reranker: architectures, "
        "classifier_from_token, is_original_qwen3_reranker.", metavar="JSON",
    )  # fmt: skip
    tool_call_parser: str = flag(
        "auto", "chat", "How calls are read from the text of a model that chooses them: auto (by the chat template), "
        f"none, {', '.join(TOOL_PARSERS)}.", metavar="NAME",
    )  # fmt: skip
    reasoning_parser: str = flag(
        "auto", "chat", "How thinking is told from the answer: auto (by the model's chat template), none, "
        f"{', '.join(REASONING_PARSERS)}.", metavar="NAME",
    )  # fmt: skip
    max_body_size: Room = flag(8 << 20, "http", "Largest request body; larger ones get 413.")
    keep_alive_timeout: Seconds = flag(
        75.0, "http", "Time for which a connection stays open after an answer: longer than a proxy keeps it (nginx: "
        "60 s), or the proxy may send a request as it closes."
    )  # fmt: skip
    max_connections: Count = flag(
        4096, "http", "Concurrent connections. For each further one the oldest without a request is closed; if "
        "all have one, it gets 503. Fewer if the process may open fewer files."
    )  # fmt: skip
    queue_at_start: bool = flag(
        True, "http", "Let requests that arrive before the model is ready wait for it, within --queue-timeout and "
        "--max-num-queued-reqs. With --no-queue-at-start they get 503 with Retry-After."
    )  # fmt: skip
    drain_timeout: Seconds = flag(30.0, "http", "Time for running requests to finish after SIGTERM; new ones get 503.")
    pace_tokens: bool = flag(
        False, "http", "Send tokens that were computed early only when their objective asks for them (first token "
        "plus TPOT each): a steady flow instead of bursts. Requests can override it with pace_tokens.",
    )  # fmt: skip
    response_store_size: Bytes = flag(
        64 << 20, "http", "Memory for responses of /v1/responses that clients may continue or retrieve; the ones "
        "used longest ago leave first. 0: none. None with several fronts (--api-server-count)."
    )  # fmt: skip
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "operations", "Log level.")
    disable_log_stats: bool = flag(False, "operations", "Do not log statistics every 10 s.")
    journal: str | None = flag(
        None, "operations", "File of arrivals, plans and results as JSON lines, for replay.", metavar="FILE"
    )

    @cached_property
    def overrides(self) -> Overrides:
        """The parsed `hf_overrides`."""
        return parse_setting(self.hf_overrides or {}, Overrides, OVERRIDES)

    def check_http(self) -> None:
        """Raise InvalidValue for invalid settings of the server."""
        check_fields(self)
        Parsers.of(self.tool_call_parser, self.reasoning_parser, template="")  # raises for an unknown name
        for name in ("api_key", "admin_key"):
            for key in getattr(self, name):
                check_key(key, name)


def check_key(key: str, name: str) -> None:
    """Raise InvalidValue for a key that clients cannot send, or that is empty and would admit all."""
    if not key:
        raise InvalidValue(f"{name} is empty, which would admit every client: is a variable unset?", name)
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidValue(f"{name}: a key must be printable ASCII characters without spaces", name)
