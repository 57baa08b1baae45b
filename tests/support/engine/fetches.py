"""Fetches of KV that wait for their pages, however busy this machine is."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.sched.api.request import Request
from jaxserve.sched.cluster import prefix_fetch

PAGE = 16  # tokens


def wait_for_pages(patch: pytest.MonkeyPatch) -> None:
    """Let every page be worth ten seconds of waiting."""

    def computing(request: Request, core: Any, pages: int) -> float:
        return 10.0 * (request.known // PAGE - pages)

    patch.setattr(prefix_fetch, "_computing", computing)
