"""The files of the dashboard as responses."""

from __future__ import annotations

from starlette.responses import Response

from jaxserve.config import ServeConfig
from jaxserve.report.dashboard_page import ABOUT, HEADERS, about, files


def page_response(path: str, config: ServeConfig) -> Response | None:
    """Return a file of the page; None if there is none at this path. It needs no key: it has no data."""
    file = about(config.tiers) if path == ABOUT else files().get(path)
    return None if file is None else Response(file.body, headers=HEADERS, media_type=file.type)
