"""When a request arrived that has waited for the server's start."""

from __future__ import annotations

from contextvars import ContextVar

# By time.monotonic(); None: the request has not waited. Each request has a task, so a context, of its own.
arrived_at_start: ContextVar[float | None] = ContextVar("arrived_at_start", default=None)
