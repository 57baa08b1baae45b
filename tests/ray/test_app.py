"""`build_app`: OpenAI's client talks to Ray Serve as to `jaxserve serve`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from tests.support.server.processes import free_ports

ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def url(cluster: Any, small: dict[str, Any]) -> Iterator[str]:
    from ray import serve

    from jaxserve.ray import build_app

    (port,) = free_ports(1)
    serve.start(http_options={"port": port})
    settings = {name.replace("_", "-"): str(value).lower() for name, value in small.items()}  # as `serve run` gives
    settings["kv-cache-memory"] = str(small["kv_cache_memory"])
    serve.run(build_app({**settings, "replicas": "2", "admin-key": ["boss"]}), name="jaxserve", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.delete("jaxserve")
    serve.shutdown()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(verify=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as made:
        yield made


def test_the_client_completes_and_streams(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "jaxserve-demo", "prompt": "def main(", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert len(chunks) > 12 and "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    chat = client.chat.completions.create(
        model="jaxserve-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in chat][-1] in ("length", "stop")
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served here"):
        client.completions.create(**{**asked, "model": "other"})


def test_the_other_routes(client: openai.OpenAI, url: str) -> None:
    assert [one.id for one in client.models.list()] == ["jaxserve-demo"]
    assert httpx.get(f"{url}/health").status_code == 200
    assert 'jaxserve:replicas_ready{model_name="jaxserve-demo"} 2.0' in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/v1/admin/replicas").status_code == 401
    found = httpx.get(f"{url}/v1/admin/replicas", headers=ADMIN).json()["replicas"]
    assert [one["ready"] for one in found] == [True, True]


def test_a_client_that_leaves_ends_its_request(client: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {"model": "jaxserve-demo", "prompt": "def main(", "max_tokens": 240}
    with client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    for _ in range(100):
        running = httpx.get(f"{url}/load").json()["running"]
        if not running:
            return
    raise AssertionError(f"{running} requests still run")


def test_settings(tmp_path: Path) -> None:
    from jaxserve.ray.app import settings_of

    file = tmp_path / "serve.yaml"
    file.write_text("mesh: 2x1\nreplicas: 2\nttft_slo: 8s\n")
    whole = ServeConfig.load(file)
    assert settings_of(str(file)) == settings_of(whole) == whole
    assert settings_of({"config": str(file)}) == whole
    assert settings_of({"config": str(file), "replicas": "3", "tpot-slo": "50ms"}).replicas == 3
    with pytest.raises(InvalidValue, match="unknown setting 'meshes'"):
        settings_of({"meshes": "2x1"})
    with pytest.raises(InvalidValue, match="settings=3 must be a ServeConfig, a mapping or the path"):
        settings_of(3)


def test_settings_that_serve_has_itself() -> None:
    from jaxserve.ray import build_app

    with pytest.raises(InvalidValue, match=r"port=9000: Ray Serve listens, set its http_options.port instead"):
        build_app({"port": 9000})
    with pytest.raises(InvalidValue, match="api_server_count=2 with 2 API keys"):
        build_app({"api_server_count": 2, "api_key": ["a", "b"]})


@pytest.mark.parametrize("name", ["rayservice-gpu", "rayservice-tpu"])
def test_ray_takes_the_applications_of_the_manifests(repo: Path, name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    spec = yaml.safe_load((repo / "deploy" / f"{name}.yaml").read_text())["spec"]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    assert [one.import_path for one in schema.applications] == ["jaxserve.ray:build_app"]
