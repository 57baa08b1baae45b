"""Several fronts with TLS, traces, profiles and KV events, as an operator starts them."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.server.collector import Collector
from tests.support.server.processes import JOIN, free_ports, served

BODY: dict[str, Any] = {"prompt": "x = [" + "1, " * 40, "max_tokens": 8, "ignore_eos": True}
BOSS = {"Authorization": "Bearer boss"}


@pytest.mark.full
def test_fronts_encrypt_and_trace_and_the_engine_profiles_and_publishes(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed: .[otel]")
    zmq: Any = pytest.importorskip("zmq", reason="ZeroMQ is not installed: .[events]")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    collector, port = Collector(), free_ports(1)[0]
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}, separators=(",", ":"))
    flags = (
        f"--api-server-count 2 --ssl-certfile {cert} --ssl-keyfile {key} --otlp-traces-endpoint {collector.url} "
        f"--profile-dir {tmp_path}/profile --kv-events-config {events} --admin-key boss --metrics-prefix vllm:"
    )
    router = zmq.Context.instance().socket(zmq.SUB)
    router.setsockopt(zmq.RCVTIMEO, int(JOIN * 1000))
    router.subscribe("")
    router.connect(f"tcp://127.0.0.1:{port}")
    trusted = ssl.create_default_context(cafile=str(cert))
    try:
        with served(flags, tmp_path / "log") as server:
            assert server.url.startswith("https://") and len(server.fronts) == 2
            clients = [httpx.Client(base_url=server.url, verify=trusted, timeout=JOIN) for _ in range(8)]
            assert clients[0].post("/start_profile", json={}, headers=BOSS).status_code == 200
            for at, client in enumerate(clients):  # connections are spread over both fronts
                answer = client.post("/v1/completions", json=BODY, headers={"X-Request-Id": f"r{at}"})
                assert answer.status_code == 200
            assert clients[1].post("/stop_profile", json={}, headers=BOSS).status_code == 200, "another front may ask"
            assert "vllm:prompt_tokens_total" in clients[0].get("/metrics").text
            tokens = clients[0].post("/tokenize", json={"prompt": BODY["prompt"]}).json()["tokens"]
            collector.wait(lambda: len(collector.named("llm_request")) == len(clients))
            assert len(collector.named("prefill")) == len(collector.named("decode")) == len(clients)
            stored: list[int] = []
            while stored[:32] != tokens[:32]:
                batch = msgspec.msgpack.decode(router.recv_multipart()[2])
                stored = next((one[3] for one in batch[1] if one[0] == "BlockStored" and one[2] is None), stored)
            assert list((tmp_path / "profile").rglob("perfetto_trace.json.gz"))
            for client in clients:
                client.close()
    finally:
        router.close(linger=0)
        collector.close()
