"""Requests that the engine gives up: status codes and Retry-After."""

from __future__ import annotations

import pytest

from jaxserve.generation.generate import GenerationFailed
from jaxserve.sched.api.errors import QueueFull, Unavailable
from jaxserve.sched.api.plan import GIVEN_UP, UNAVAILABLE
from jaxserve.server.failures import refusal, response_of


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (GenerationFailed("a step hangs", UNAVAILABLE), 503, "unavailable"),
        (GenerationFailed("it waited 600 s", "expired"), 503, "queue_timeout"),
        (GenerationFailed("not now", "refused"), 429, "slo_unattainable"),
        (Unavailable("no instance responds", 7.0), 503, "unavailable"),
        (QueueFull("200 requests wait", 12.5), 503, "queue_full"),
    ],
)
def test_temporary_failures_have_retry_after(error: Exception, status: int, code: str) -> None:
    found = refusal(error)
    assert (found.status, found.code) == (status, code) and str(error) in str(found)
    assert int(response_of(error).headers["Retry-After"]) >= 1


def test_every_reason_has_a_status() -> None:
    assert {reason: refusal(GenerationFailed("why", reason)).status for reason in GIVEN_UP} == {
        "error": 500,
        "rejected": 400,
        "refused": 429,
        UNAVAILABLE: 503,
        "expired": 503,
    }
