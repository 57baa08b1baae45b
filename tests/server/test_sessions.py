"""Sessions over HTTP: names are checked, clients are apart, and each turn has its own stages."""

from __future__ import annotations

import pytest

from jaxserve.generation.sharing import session_of

BODY = {"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}


@pytest.mark.parametrize(
    ("field", "header", "param"),
    [
        ("", None, "session_id"),
        ("x" * 257, None, "session_id"),
        (7, None, "session_id"),
        (None, "x" * 257, "x-session-id"),
    ],
)
def test_a_bad_name_is_refused(plain, field, header, param):
    body = BODY if field is None else {**BODY, "session_id": field}
    refused = plain.http.post("/v1/completions", json=body, headers={} if header is None else {"x-session-id": header})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_every_turn_of_a_session_has_its_own_stages(plain):
    """The field precedes the header; both turns reach the engine as one session, each with its objectives."""
    for tpot in (200, 50):
        stages = {"thinking": {"tpot_slo_ms": tpot}, "answer": {"tpot_slo_ms": 2 * tpot}}
        body = {**BODY, "stage_slo": stages}
        named = {"x-session-id": "tool loop"}
        for more, headers in (({}, named), ({"session_id": "tool loop"}, {"x-session-id": "another"}), ({}, {})):
            assert plain.http.post("/v1/completions", json={**body, **more}, headers=headers).status_code == 200
    made = plain.engine.submitted
    assert [one.asked.session == session_of("", "tool loop", {}) for one in made] == [True, True, False] * 2
    assert [one.asked.session for one in made[2::3]] == ["", ""]
    for one, tpot in zip(made[::3], (0.2, 0.05), strict=True):
        assert (one.slo.tpot_of("thinking"), one.slo.tpot_of("answer")) == pytest.approx((tpot, 2 * tpot))


def test_clients_with_the_same_name_have_different_sessions():
    assert session_of("red", "a", {}) != session_of("blue", "a", {})
    assert session_of("red", None, {"x-session-id": "a"}) == session_of("red", "a", {})


def test_a_session_pins_pages_of_a_real_engine(live):
    prompt = [300 + (13 * at) % 900 for at in range(64)]
    before = sum(one.pages_pinned for one in live.engine.stats().instances)
    for turn in (prompt, [*prompt, 5, 6]):
        body = {"prompt": turn, "max_tokens": 2, "temperature": 0, "session_id": "a session"}
        assert live.http.post("/v1/completions", json=body).status_code == 200
        live.quiet()
    assert sum(one.pages_pinned for one in live.engine.stats().instances) - before >= 4
    assert "jaxserve:session_pinned_pages{" in live.http.get("/metrics").text
    ended = live.http.delete("/v1/sessions/a%20session")
    assert ended.json() == {"id": "a session", "object": "session", "deleted": True}
    assert sum(one.pages_pinned for one in live.engine.stats().instances) == before
    again = live.http.delete("/v1/sessions/a%20session")
    assert again.status_code == 404 and again.json()["error"]["param"] == "session_id"
    assert live.http.delete(f"/v1/sessions/{'x' * 257}").status_code == 400
