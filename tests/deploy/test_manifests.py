"""The manifests in deploy/ are valid, and their flags, settings, metrics and sizes are those of jaxserve."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jaxserve.capacity.manifest import manifest
from jaxserve.config import ServeConfig
from jaxserve.fleet.nodes import devices_of, lay_out
from jaxserve.version import __version__
from tests.support.flags import parsed

KUBERNETES = "1.34"
FILES = ("kubernetes", "rayservice-gpu", "rayservice-tpu", "inference-pool")
OWN = {"RayService": "rayservice", "InferencePool": "inferencepool", "HTTPRoute": "httproute"}
RAYS = ("rayservice-gpu", "rayservice-tpu")


def resources(repo: Path, name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((repo / "deploy" / f"{name}.yaml").read_text()))


def found(repo: Path, name: str, kind: str, called: str = "jaxserve") -> dict[str, Any]:
    (one,) = [one for one in resources(repo, name) if one["kind"] == kind and one["metadata"]["name"] == called]
    return one


def pods(resource: Any) -> Iterator[dict[str, Any]]:
    """Yield the specs of pods anywhere in a resource."""
    if isinstance(resource, dict):
        if "containers" in resource:
            yield resource
        for value in resource.values():
            yield from pods(value)
    elif isinstance(resource, list):
        for value in resource:
            yield from pods(value)


def containers(repo: Path) -> Iterator[dict[str, Any]]:
    for name in FILES:
        for one in resources(repo, name):
            for pod in pods(one):
                yield from pod["containers"]


def own_schema(repo: Path, kind: str) -> Any:
    return json.loads((repo / "deploy" / "schemas" / f"{OWN[kind]}.json").read_text())


def test_every_manifest_is_tested(repo: Path) -> None:
    assert sorted(path.stem for path in (repo / "deploy").glob("*.yaml")) == sorted(FILES)
    schemas = sorted(path.stem for path in (repo / "deploy" / "schemas").glob("*.json"))
    assert schemas == sorted([*OWN.values(), "compose"])


@pytest.mark.parametrize("name", FILES)
def test_custom_resources_fit_their_schemas(repo: Path, name: str) -> None:
    for one in resources(repo, name):
        if one["kind"] in OWN:
            jsonschema.validate(one, own_schema(repo, one["kind"]))


@pytest.mark.parametrize("name", FILES)
def test_resources_fit_the_schemas_of_kubernetes(repo: Path, name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: .[test]")
    for one in resources(repo, name):
        if one["kind"] in OWN:
            for pod in pods(one):
                kubernetes.validate(
                    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, KUBERNETES, strict=True
                )
        else:
            kubernetes.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("name", "kind", "at", "wrong", "error"),
    [
        ("rayservice-gpu", "RayService", "rayClusterConfig", {"workerGroups": []}, "workerGroups"),
        ("rayservice-tpu", "RayService", "rayClusterConfig.workerGroupSpecs.0", {"minReplicas": None}, "minReplicas"),
        ("inference-pool", "InferencePool", "endpointPickerRef", {"port": None}, "port"),
        ("inference-pool", "InferencePool", "endpointPickerRef", {"failureMode": "Open"}, "Open"),
        ("inference-pool", "HTTPRoute", "parentRefs.0", {"weight": 1}, "weight"),
        ("inference-pool", "HTTPRoute", "rules.0.backendRefs.0", {"group": None, "kind": None}, "port"),
        ("inference-pool", "HTTPRoute", "rules.0.timeouts", {"backendRequest": "1.5h"}, "1.5h"),
    ],
)
def test_a_wrong_field_does_not_fit(
    repo: Path, name: str, kind: str, at: str, wrong: dict[str, Any], error: str
) -> None:
    """As in the custom resource's definition; None: the field is absent."""
    one = found(repo, name, kind)
    inner = one["spec"]
    for step in at.split("."):
        inner = inner[int(step) if step.isdigit() else step]
    inner |= wrong
    for field in [field for field, value in wrong.items() if value is None]:
        del inner[field]
    with pytest.raises(jsonschema.ValidationError, match=error):
        jsonschema.validate(one, own_schema(repo, kind))


def test_the_server_takes_these_flags_and_has_time_to_drain(repo: Path) -> None:
    (pod,) = pods(found(repo, "kubernetes", "Deployment"))
    (container,) = pod["containers"]
    assert container["command"] == ["jaxserve", "serve"]
    config = parsed(container["args"])
    assert config.host == "0.0.0.0" and config.port == container["ports"][0]["containerPort"]
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + config.drain_timeout + 15
    assert devices_of(config) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    pool = found(repo, "inference-pool", "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": config.port}]
    labels = found(repo, "kubernetes", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"] == labels == found(repo, "kubernetes", "Service")["spec"]["selector"]


def test_the_planner_writes_these_resources(repo: Path) -> None:
    """But for the load: flags, resources, the number of pods and what scrapes them."""
    deployment, service = manifest(["jaxserve", "serve", "--model", "m"], "gpu", 8)
    ours, written = found(repo, "kubernetes", "Deployment"), deployment
    for one in (ours, written):
        del one["spec"]["replicas"]
        one["spec"]["template"]["metadata"].pop("annotations", None)
        (container,) = one["spec"]["template"]["spec"]["containers"]
        args = container.pop("args")
        assert {"--host=0.0.0.0", "--port=8000", "--drain-timeout=120s"} <= set(args)
        del container["resources"]["limits"]
    assert written == ours
    assert service == found(repo, "kubernetes", "Service")


@pytest.mark.parametrize("name", RAYS)
def test_the_application_takes_these_settings_and_its_replicas_fit(repo: Path, name: str) -> None:
    spec = found(repo, name, "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, function = application["import_path"].split(":")
    assert module == "jaxserve.ray" and f"def {function}(" in (repo / "jaxserve" / "ray" / "__init__.py").read_text()
    config = ServeConfig.load(None, **application["args"])
    cluster, nodes = spec["rayClusterConfig"], dict[str, int]()
    for group in cluster["workerGroupSpecs"]:
        (pod,) = pods(group)
        limits = pod["containers"][0]["resources"]["limits"]
        devices = int(limits.get("nvidia.com/gpu") or limits["google.com/tpu"])
        nodes |= {f"{group['groupName']}-{at}": devices for at in range(group["replicas"] * group["numOfHosts"])}
    assert [sum(shares) for shares in lay_out(config, "GPU", nodes)] == [devices_of(config)] * config.replicas
    assert f"ray=={cluster['rayVersion']}\n" in (repo / ".ci" / "constraints.txt").read_text()


def test_images_are_of_this_version_and_their_extras_exist(repo: Path) -> None:
    images = {one["image"] for one in containers(repo) if "jaxserve:" in one["image"]}
    assert images == {f"registry.example.com/jaxserve:{__version__}"}
    extras = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,]+)", (repo / "deploy" / "Dockerfile").read_text())
    assert asked and {extra for one in asked for extra in one.split(",")} <= extras.keys()


def test_metrics_exist(repo: Path) -> None:
    """The autoscaler, the endpoint picker and the rule of the guide read metrics that jaxserve has."""
    known = set(re.findall(r"^\| `(jaxserve:\w+)`", (repo / "docs" / "reference" / "metrics.md").read_text(), re.M))
    (pod,) = pods(found(repo, "inference-pool", "Deployment", "jaxserve-picker"))
    picked = set(re.findall(r"=(jaxserve:\w+)", " ".join(pod["containers"][0]["args"])))
    assert len(picked) == 2 and picked <= known
    metrics = found(repo, "kubernetes", "HorizontalPodAutoscaler")["spec"]["metrics"]
    guide = (repo / "docs" / "guide" / "deploy.md").read_text()
    (text,) = re.findall(r"```yaml\n(rules:.*?)```", guide, re.DOTALL)
    rules = yaml.safe_load(text)["rules"]
    assert [one["pods"]["metric"]["name"] for one in metrics] == [rule["name"]["as"] for rule in rules]
    for rule in rules:
        (series,) = re.findall(r"(jaxserve:\w+)\{", rule["seriesQuery"])
        assert series in known and "<<.LabelMatchers>>" in rule["metricsQuery"]


def test_the_picker_is_where_the_pool_says(repo: Path) -> None:
    picker = found(repo, "inference-pool", "InferencePool")["spec"]["endpointPickerRef"]
    service = found(repo, "inference-pool", "Service", picker["name"])
    assert [port["port"] for port in service["spec"]["ports"]] == [picker["port"]["number"]]
    config = yaml.safe_load(found(repo, "inference-pool", "ConfigMap", "jaxserve-picker")["data"]["picker.yaml"])
    names = {plugin["type"] for plugin in config["plugins"]}
    used = {one["pluginRef"] for profile in config["schedulingProfiles"] for one in profile["plugins"]}
    assert used <= names
