"""API keys from flags, file and environment: named, hashed, and what they permit."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import openai
import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.server.keys import Keys, warn_if_open
from jaxserve.server.service import Service
from tests.support.server.live import SMALL, Live

ROLES = "/v1/admin/roles"
GOOD = {"prompt": "def main(", "max_tokens": 2}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_unusable_keys_are_refused(name, key):
    with pytest.raises(InvalidValue, match=name) as refused:
        ServeConfig.load(**{name: (key,)})
    assert not key or key not in str(refused.value)
    variable = f"JAXSERVE_{name.upper()}"
    with pytest.raises(InvalidValue, match=variable):
        Keys.of(ServeConfig.load(), {variable: key})


def test_an_empty_bearer_grants_nothing(fake):
    live = fake(config={"api_key": ("sesame", "second")})
    for header in ("Bearer", "bearer", "", "Basic sesame", "sesame", "Bearer sesam", "Bearer sesame2"):
        refused = live.http.post("/v1/completions", json=GOOD, headers={"Authorization": header})
        assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer", header
    for key in ("sesame", "second"):
        assert live.http.post("/v1/completions", json=GOOD, headers=bearer(key)).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        live.client.models.list()


def test_keys_come_from_flags_file_and_environment_and_have_names(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nalice sk-1\n\nalice sk-2\nsk-3\nbob   sk-4\n")
    keys = Keys.of(ServeConfig.load(api_key=("a",), api_key_file=str(file)), {"JAXSERVE_API_KEY": "b"})
    names = {key: keys.client(key) for key in ("a", "b", "sk-1", "sk-2", "sk-3", "sk-4", "sk-5", "")}
    assert names == {
        "a": "key-1", "b": "key-2", "sk-1": "alice", "sk-2": "alice", "sk-3": "key-5", "sk-4": "bob", "sk-5": None,
        "": None,
    }  # fmt: skip
    assert keys.names == ("key-1", "key-2", "alice", "key-5", "bob")


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "contains no key"), ("a b c", ":1 must be"), ("x/y sk", ":1 must be"), ("key-7 sk", "not key-N"),
     ("alice sk\nbob sk", "two names"), ("\n\nschlüssel", ":3")],
)  # fmt: skip
def test_an_invalid_key_file_is_refused(tmp_path, text, says):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidValue, match=says) as refused:
        Keys.of(ServeConfig.load(api_key_file=str(tmp_path / "keys")), {})
    assert "sk" not in str(refused.value).replace(str(tmp_path), "")
    with pytest.raises(InvalidValue, match="cannot be read"):
        Keys.of(ServeConfig.load(api_key_file=str(tmp_path / "none")), {})


def test_keys_are_stored_as_digests(fake):
    live = fake(config={"api_key": ("sesame-9999",), "admin_key": ("boss-9999",)})
    held = [vars(live.service.keys), vars(live.service.config), repr(ServeConfig.load(api_key=("sesame-9999",)))]
    assert "-9999" not in repr(held)


def test_an_open_server_warns(caplog, tmp_path):
    def warned(environment: dict[str, str], **settings) -> str:
        caplog.clear()
        config = ServeConfig.load(**settings)
        with caplog.at_level(logging.WARNING):
            warn_if_open(config, Keys.of(config, environment))
        return caplog.text

    assert "no key is set" in warned({}, host="0.0.0.0")
    assert not warned({"JAXSERVE_API_KEY": "a"}, host="0.0.0.0")
    assert not warned({}) and not warned({}, host="127.0.0.2") and not warned({}, host="::1")
    (tmp_path / "keys").write_text("a")
    (tmp_path / "keys").chmod(0o644)
    assert "chmod 600" in warned({}, api_key_file=str(tmp_path / "keys"))
    (tmp_path / "keys").chmod(0o600)
    assert not warned({}, api_key_file=str(tmp_path / "keys"))


def test_metrics_and_docs_can_be_protected(fake):
    shown = ("/metrics", "/docs", "/redoc", "/openapi.json", "/version", "/load", "/nowhere")
    live = fake(config={"api_key": ("sesame",)})
    assert {live.http.get(path).status_code for path in shown} == {200, 404}
    live = fake(config={"api_key": ("sesame",), "protect_metrics": True})
    assert {live.http.get(path).status_code for path in shown} == {401}
    assert {live.http.get(path, headers=bearer("sesame")).status_code for path in shown} == {200, 404}
    assert live.http.get("/health").status_code == 200
    with pytest.raises(InvalidValue, match="protect_metrics needs"):
        Keys.of(ServeConfig.load(protect_metrics=True), {})


def test_client_keys_grant_no_admin_access(fake):
    live = fake(config={"api_key": ("sesame",)})
    for headers in ({}, bearer("sesame"), {"Authorization": "Bearer"}):
        refused = live.http.get(ROLES, headers=headers)
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_off"
    live = fake(config={"api_key": ("sesame",), "admin_key": ("boss",)})
    for headers in ({}, bearer("sesame"), {"Authorization": "Bearer"}):
        for refused in (live.http.get(ROLES, headers=headers), live.http.post(ROLES, json={}, headers=headers)):
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_admin_key"
    assert live.http.get(ROLES, headers=bearer("boss")).json()["roles"] == ["mixed"]
    assert live.http.post(ROLES, json={}, headers=bearer("boss")).status_code == 400
    assert live.http.post("/v1/completions", json=GOOD, headers=bearer("boss")).status_code == 401
    with pytest.raises(InvalidValue, match="admin_key is also an API key"):
        Keys.of(ServeConfig.load(api_key=("a",), admin_key=("a",)), {})


def test_admin_routes_refuse_what_a_web_page_can_send(fake):
    """A page can post text/plain across origins without preflight, and reach loopback by its own name (rebinding)."""
    live = fake(config={"admin_key": ("boss",)})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"):
        sent = live.http.post(ROLES, content=b"{}", headers={**bearer("boss"), "Content-Type": kind})
        assert sent.status_code == 415, kind
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1].evil"):
        for sent in (
            live.http.post(ROLES, json={}, headers={**bearer("boss"), "Host": host}),
            live.http.get(ROLES, headers={**bearer("boss"), "Host": host}),
        ):
            assert sent.status_code == 403 and sent.json()["error"]["code"] == "wrong_host", host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert live.http.get(ROLES, headers={**bearer("boss"), "Host": host}).status_code == 200, host


@pytest.fixture(scope="module")
def tenants(engine, tokenizer) -> Iterator[Live]:
    """A server with two keys on the real engine."""
    made = Live(Service(engine, tokenizer, ServeConfig.load(mesh="2x1", api_key=("red", "blue"), **SMALL)))
    yield made
    made.stop()


def found(live: Live, prompt: list[int], key: str | None = None, salt: str | None = None) -> int:
    """Return the number of prompt tokens found in the prefix cache."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **({} if salt is None else {"cache_salt": salt})}
    answer = live.http.post("/v1/completions", json=body, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    live.quiet()
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_prefix_cache_is_not_shared_between_clients(tenants):
    prompt = [100 + (7 * at) % 900 for at in range(64)]
    assert found(tenants, [*prompt, 5], "red") == 0
    assert found(tenants, [*prompt, 6], "red") == 64
    assert found(tenants, [*prompt, 6], "blue") == 0, "another client's prompt was a hit"
    assert found(tenants, [*prompt, 7], "blue") == 64


def test_cache_salts_separate_requests(live, tenants):
    prompt = [200 + (11 * at) % 900 for at in range(64)]
    assert found(live, [*prompt, 5]) == 0
    assert found(live, [*prompt, 6]) == 64, "without keys and salts, the cache is shared"
    assert found(live, [*prompt, 6], salt="one") == 0
    assert found(live, [*prompt, 7], salt="one") == 64
    assert found(live, [*prompt, 7], salt="two") == 0
    assert found(tenants, [*prompt, 7], "red", salt="one") == 0
    assert found(tenants, [*prompt, 7], "blue", salt="one") == 0
    for salt in ("", "x" * 1025):
        refused = live.http.post("/v1/completions", json={"prompt": prompt, "cache_salt": salt})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
