"""compose.yaml, the images and the Grafana dashboard fit each other, the Compose schema and jaxserve."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from jaxserve.server import app
from jaxserve.version import __version__
from tests.support.flags import parsed

COMPOSE = ("compose.yaml", "compose.cuda.yaml")
UNITS = {"s", "short", "percentunit", "bytes", "ops", "reqps"}


def loaded(repo: Path, path: str) -> Any:
    return yaml.safe_load((repo / path).read_text(encoding="utf-8"))


def schema(repo: Path) -> Any:
    return json.loads((repo / "deploy" / "schemas" / "compose.json").read_text())


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_fit_the_schema(repo: Path, name: str) -> None:
    jsonschema.validate(loaded(repo, name), schema(repo))


@pytest.mark.parametrize(
    "wrong",
    [{"healthchek": {}}, {"depends_on": {"prometheus": {}}}, {"ports": ["a:b"]}, {"stop_grace_period": "1 min"}],
)
def test_the_schema_refuses_mistakes(repo: Path, wrong: dict[str, Any]) -> None:
    given = loaded(repo, "compose.yaml")
    given["services"]["grafana"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, schema(repo))


def test_every_path_exists(repo: Path) -> None:
    given = loaded(repo, "compose.yaml")
    for service in given["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (repo / source).exists(), source
            else:
                assert source in given["volumes"]
    build = given["services"]["jaxserve"]["build"]
    assert (repo / build["context"] / build["dockerfile"]).is_file()
    assert "/cache" in (repo / build["dockerfile"]).read_text()


def test_the_server_takes_the_flags_and_has_time_to_drain(repo: Path) -> None:
    one = loaded(repo, "compose.yaml")["services"]["jaxserve"]
    assert one["command"][:2] == ["jaxserve", "serve"]
    config = parsed(one["command"][2:])
    assert config.host == "0.0.0.0" and one["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert int(one["stop_grace_period"].removesuffix("s")) >= config.drain_timeout + 15
    assert all(name.startswith("JAXSERVE_") for name in one["environment"])
    keys = (repo / "jaxserve" / "server" / "keys.py").read_text()
    assert all(f'"{name}"' in keys for name in one["environment"])


def test_images_are_of_this_version_and_their_extras_exist(repo: Path) -> None:
    extras = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in COMPOSE:
        one = loaded(repo, name)["services"]["jaxserve"]
        assert re.fullmatch(rf"jaxserve:{re.escape(__version__)}(-cuda)?", one["image"])
        assert set(one["build"]["args"]["EXTRAS"].split(",")) <= extras.keys()


def test_what_the_image_is_built_from_is_in_its_context(repo: Path) -> None:
    patterns = [line for line in (repo / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    needed = ["pyproject.toml", "README.md", "LICENSE", "jaxserve", "pallas_kernels", "sched", "configs", ".ci"]
    for name in needed:
        assert (repo / name).exists()
        assert not any(fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns), name
    links = [path for path in (repo / "jaxserve").iterdir() if path.is_symlink()]
    assert links and all(path.resolve().name in needed for path in links)
    assert "COPY . ." in (repo / "deploy" / "Dockerfile").read_text()


def test_prometheus_reads_the_server_and_grafana_reads_prometheus(repo: Path) -> None:
    services = loaded(repo, "compose.yaml")["services"]
    (scrape,) = loaded(repo, "deploy/prometheus/prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["jaxserve:8000"]}] and "jaxserve" in services
    assert f'"{scrape["metrics_path"]}"' in Path(app.__file__).read_text()
    (source,) = loaded(repo, "deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = loaded(repo, "deploy/grafana/provisioning/dashboards/jaxserve.yaml")["providers"]
    folder = provider["options"]["path"]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./deploy/grafana/jaxserve.json"] == f"{folder}/jaxserve.json"
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(folder)
    paths = {word.split("=")[1] for word in services["prometheus"]["command"] if word.startswith("--config.file")}
    assert paths <= {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}


def shown(repo: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repo / "deploy" / "grafana" / "jaxserve.json").read_text())
    return found


@pytest.fixture
def dashboard(load_file: Callable[[str], ModuleType]) -> Any:
    return load_file("scripts/dashboard.py")


def exported(docs: Any) -> dict[str, set[str]]:
    """Return the labels of every series that a server exports."""
    return {
        sample.name: set(sample.labels) for family in docs.families() for sample in family.samples
    }  # fmt: skip


def test_the_dashboard_is_the_one_of_the_script(dashboard: Any) -> None:
    assert dashboard.main(["--check"]) == 0


def test_every_metric_and_label_of_the_dashboard_is_exported(
    repo: Path, load_file: Callable[[str], ModuleType]
) -> None:
    known = exported(load_file("scripts/docs.py"))
    queries = [target["expr"] for panel in shown(repo)["panels"] for target in panel.get("targets", ())]
    used = set()
    for query in queries:
        for name, labels in re.findall(r"(jaxserve:\w+)\{([^}]*)\}", query):
            used.add(name)
            assert name in known, name
            assert set(re.findall(r"(\w+)=", labels)) <= known[name], query
            for group in re.findall(r"by \(([^)]*)\) \((?:rate\()?" + re.escape(name) + r"\{", query):
                assert set(group.split(", ")) <= known[name], query
        promql_parser.parse(re.sub(r"\$\w+", "5m", query))  # raises ValueError
    assert len(used) > 40
    wanted = ("slo_attained_total", "time_to_first_token_seconds_bucket", "slo_seconds", "num_requests_waiting",
              "instance_slack_seconds", "prefill_budget_tokens", "kv_cache_usage_perc", "kv_tier_bytes",
              "generation_tokens_total")  # fmt: skip
    assert {f"jaxserve:{name}" for name in wanted} <= used


def test_the_dashboard_has_the_structure_that_grafana_reads(repo: Path) -> None:
    board = shown(repo)
    assert board["uid"] and board["title"] and board["schemaVersion"] >= 39
    variables = {one["name"] for one in board["templating"]["list"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] == "timeseries" and panel["title"] and panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        for target in panel["targets"]:
            legends = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groups = {name for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in group.split(", ")}
            assert legends <= groups, target
            asked = set(re.findall(r"\$\{?(\w+)", target["expr"] + target["datasource"]["uid"]))
            assert asked <= variables | {"__rate_interval"}, target


def lost(given: Any, back: Any, path: str = "") -> list[str]:
    """Return the paths of what is not in `back` as it was given."""
    if isinstance(given, dict) and isinstance(back, dict):
        return [one for key, value in given.items() for one in lost(value, back.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        return [one for at, pair in enumerate(zip(given, back, strict=True)) for one in lost(*pair, f"{path}/{at}")]
    return [] if given == back else [path]


def through_grafana(board: dict[str, Any]) -> Any:
    """Return a dashboard as the models of Grafana read and write it."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def test_grafana_reads_every_field(repo: Path) -> None:
    """Nothing is lost in Grafana's own models, apart from the text of the variable's query, which its editor shows."""
    board = shown(repo)
    assert lost(board, through_grafana(board)) == ["/templating/list/1/definition"]


def test_grafana_drops_a_field_that_it_does_not_know(repo: Path) -> None:
    board = shown(repo)
    panel = next(one for one in board["panels"] if one["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["unitt"] = "s"
    assert any(path.endswith("/unitt") for path in lost(board, through_grafana(board)))


def test_another_prefix_reaches_every_query(dashboard: Any, tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    assert dashboard.main(["--prefix", "vllm:", "--out", str(path)]) == 0
    text = path.read_text()
    assert text.count("vllm:") == (dashboard.FILE).read_text().count("jaxserve:") and "jaxserve:" not in text
