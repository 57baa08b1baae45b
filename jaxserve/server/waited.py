"""How long a request has waited for the server's start before the service got it."""

from __future__ import annotations

from contextvars import ContextVar

# Seconds. Each request has a task, so a context, of its own.
waited_at_start: ContextVar[float] = ContextVar("waited_at_start", default=0.0)
