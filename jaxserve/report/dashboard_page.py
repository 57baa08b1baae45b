"""The files of the dashboard: a page without a build step, whose scripts and styles come from the same server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "page"
PREFIX = "/dashboard/"
ABOUT = PREFIX + "about.json"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What a model writes is text on the page; if it became more, this keeps it from running or calling anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class File(NamedTuple):
    """One file as a response."""

    type: str
    body: bytes


def about(tiers: Iterable[str] = (), recorded: Mapping[str, Any] | None = None) -> File:
    """Return what the page shows. tiers: that requests may name. recorded: a run's `title`; None: a server."""
    return File("application/json", json.dumps({"tiers": list(tiers), "recorded": recorded}).encode())


@cache
def files() -> dict[str, File]:
    """Return all files by their paths on the server."""
    pages = {
        PREFIX + path.name: File(TYPES[path.suffix], path.read_bytes())
        for path in sorted(FOLDER.iterdir())
        if path.suffix in TYPES
    }
    return {"/": pages.pop(PREFIX + "index.html"), **pages}
