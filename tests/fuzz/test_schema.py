"""Requests that schemathesis makes of `/openapi.json`: no server error, nothing left. Needs `pip install .[fuzz]`."""

from __future__ import annotations

import pytest

from jaxserve.server.app import create_app

EXAMPLES = 150  # a route


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_request_of_the_schema_is_a_server_error(service):
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    asked = 0

    for result in schema.get_all_operations():
        operation = result.ok()
        if not operation.path.startswith("/v1/models/{"):  # a path is no body

            @hypothesis.settings(
                max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
            )
            @hypothesis.given(case=operation.as_strategy())
            def ask(case):
                nonlocal asked
                asked += 1
                answer = case.call()
                ours = answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
                assert answer.status_code < 500 or ours, (case, answer.status_code, answer.text[:500])

            ask()
    assert asked > 5 * EXAMPLES
    service.engine.check()
    assert service.active == 0
