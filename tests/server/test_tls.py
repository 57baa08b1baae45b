"""HTTPS with a self-signed certificate, client certificates, and clear errors for files that cannot be used."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.server.service import Service
from jaxserve.server.tls import check_tls
from tests.support.server.double import Double
from tests.support.server.starting import Starting

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes the certificates, is not installed")
BODY = {"prompt": "def main(", "max_tokens": 5}


def certificate(folder: Path, name: str, *more: str) -> tuple[Path, Path]:
    """Make a self-signed certificate of 127.0.0.1, and return the files of it and its key."""
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        *(str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-keyout", str(key), "-out", str(made), "-days", "1", "-subj", f"/CN={name}"),
        *("-addext", "subjectAltName=IP:127.0.0.1", *(more or ("-nodes",))),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def server(folder: Path) -> tuple[Path, Path]:
    return certificate(folder, "server")


def client(url: str, trusted: Path, own: tuple[Path, Path] | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(*map(str, own))
    return httpx.Client(base_url=url.replace("http://", "https://"), verify=context, timeout=60)


def test_answers_and_streams_are_encrypted_from_the_start(server, tokenizer):
    files = {"ssl_certfile": str(server[0]), "ssl_keyfile": str(server[1])}
    made = Starting(ServeConfig.load(disable_log_stats=True, **files))
    try:
        with client(made.url, server[0]) as trusting:
            assert trusting.get("/health").status_code == 503
            with pytest.raises(httpx.ConnectError, match="certificate"):
                httpx.get(made.url + "/health")
            with pytest.raises(httpx.TransportError):
                httpx.get(made.url.replace("https://", "http://") + "/health")
            service = Service(Double(), tokenizer, made.config)
            made.open(service)
            assert trusting.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 5
            with trusting.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
            assert trusting.get("/health", headers={"a": "b" * 70_000}).status_code == 431
            service.close()
    finally:
        made.stop()


def test_clients_must_present_a_certificate_of_the_authority(fake, server, folder):
    own, other = certificate(folder, "client"), certificate(folder, "other")
    files = {"ssl_certfile": str(server[0]), "ssl_keyfile": str(server[1]), "ssl_ca_certs": str(own[0])}
    live = fake(config={**files, "ssl_cert_reqs": 2})
    with client(live.url, server[0], own) as known:
        assert known.get("/health").status_code == 200
    for wrong in (None, other):
        with client(live.url, server[0], wrong) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/health")


def test_files_are_checked_before_a_model_is_loaded(server, folder):
    text, encrypted = folder / "text.pem", certificate(folder, "encrypted", "-passout", "pass:secret")
    text.write_text("no certificate")
    stranger = certificate(folder, "stranger")
    fine = {"ssl_certfile": str(server[0]), "ssl_keyfile": str(server[1])}
    check_tls(ServeConfig.load())
    check_tls(ServeConfig.load(**fine))
    for given, param, message in (
        ({"ssl_certfile": str(folder / "none.pem")}, "ssl_certfile", "cannot be read: No such file"),
        ({"ssl_keyfile": str(folder)}, "ssl_keyfile", "cannot be read: Is a directory"),
        ({"ssl_ca_certs": str(folder / "none.pem")}, "ssl_ca_certs", "cannot be read"),
        ({"ssl_certfile": str(text)}, "ssl_keyfile", "is not a PEM certificate"),
        ({"ssl_keyfile": str(stranger[1])}, "ssl_keyfile", "with ssl_keyfile="),
        ({"ssl_keyfile": str(encrypted[1]), "ssl_certfile": str(encrypted[0])}, "ssl_keyfile", "without a passphrase"),
        ({"ssl_ca_certs": str(text)}, "ssl_ca_certs", "has no PEM certificate"),
    ):
        with pytest.raises(InvalidValue, match=message) as refused:
            check_tls(ServeConfig.load(**{**fine, **given}))
        assert refused.value.param == param
