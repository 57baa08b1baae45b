"""The flags by which a command names the server that it talks to."""

from __future__ import annotations

import argparse
import os

from jaxserve.settings.operations import check_url

KEY = "JAXSERVE_API_KEY"


def add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="address of the server, with or without /v1 [%(default)s]"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"key of the server; other users see flags, so prefer the variable {KEY}"
    )


def base_url(text: str) -> str:
    """Return the address without a final /v1. Raises InvalidValue if it is none."""
    url = text if "://" in text else f"http://{text}"
    check_url(url, "url", "http://HOST[:PORT]")
    return url.rstrip("/").removesuffix("/v1")


def api_key(args: argparse.Namespace) -> str:
    """Return the key of --api-key or of the variable; `none` without one, as OpenAI's clients send it."""
    return args.api_key or os.environ.get(KEY) or "none"
