"""What keeps engines from a Ray cluster is said at once, with the value and the remedy."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from tests.support.timing import PATIENCE, until

QUICK = 15.0  # seconds, most of them Ray's import on a busy machine


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("cluster", "ray='cluster' must be HOST:PORT, ray://HOST:PORT, auto or local"),
        ("ray://", "ray='ray://' must be HOST:PORT"),
        ("127.0.0.1:1", "ray='127.0.0.1:1': no Ray cluster answers there .*`ray start --head` starts one"),
        ("ray://127.0.0.1:1", "ray='ray://127.0.0.1:1': no Ray cluster answers there"),
    ],
)
def test_an_address_that_is_none(address: str, why: str) -> None:
    from jaxserve.ray.engines import RayEngines

    began = time.monotonic()
    with pytest.raises(InvalidValue, match=why):
        RayEngines(ServeConfig(ray=address))
    assert time.monotonic() - began < QUICK


def test_a_host_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.ray import cluster

    def silent(*args: Any, timeout: float) -> Any:
        assert timeout == cluster.REACHING <= 5.0
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(InvalidValue, match=r"no Ray cluster answers there \(timed out\)"):
        cluster.connect("192.0.2.1:6379", 1)


def test_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from jaxserve.ray import cluster

    monkeypatch.setattr("ray.init", lambda **options: (_ for _ in ()).throw(ConnectionError("Could not find any")))
    with pytest.raises(InvalidValue, match=r"ray='auto': cannot join a Ray cluster \(Could not find any\); `ray start"):
        cluster.connect("auto", 1)


def test_a_cluster_of_its_own_has_devices_and_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve.ray import cluster

    def init(*, _system_config: dict[str, Any], **options: Any) -> None:
        given.append(options | {"_system_config": dict(_system_config)})
        _system_config["object_spilling_config"] = "folder of this session"  # as Ray does

    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    cluster.connect("local", 6)
    cluster.connect("local", 1)
    assert [one["address"] for one in given] == ["local", "local"]
    assert [one["num_cpus"] for one in given] == [6, 2]
    assert [one["_system_config"] for one in given] == [{"worker_niceness": 0}] * 2


def test_nodes_are_asked_and_a_missing_model_is_named(cluster: Any, tmp_path: Any) -> None:
    from jaxserve.ray.cluster import check_nodes, kind_of, model_folder, nodes

    found = nodes()
    assert kind_of(found) == "CPU" and len(found) == 1
    check_nodes(found, None)
    check_nodes(found, str(tmp_path))
    gone = str(tmp_path / "gone")
    assert model_folder(gone) == gone and model_folder("Qwen/Qwen3-8B") is None and model_folder(None) is None
    with pytest.raises(InvalidValue, match=f"model='{gone}' does not exist on the Ray node {found[0].name[:4]}.*copy"):
        check_nodes(found, gone)


@pytest.mark.parametrize("name", ["python", "jax", "jaxserve"])
@pytest.mark.parametrize(("version", "says"), [("0.0.1", "is 0.0.1"), (None, "is not installed")])
def test_other_versions_are_named(name: str, version: str | None, says: str) -> None:
    from jaxserve.ray.cluster import check_facts, here, looker

    mine = here()
    assert looker()(None) == {**mine, "model": True}
    seen = {"first": looker()(None), "second": {**looker()(None), name: version}}
    with pytest.raises(InvalidValue, match=f"{name} {says} on the Ray node second, and {mine[name]} here: install one"):
        check_facts(seen, mine, None)


def test_more_replicas_than_devices(cluster: Any, small: dict[str, Any]) -> None:
    from jaxserve.ray.engines import RayEngines

    with pytest.raises(InvalidValue, match=r"replicas=5 need 1 CPU each \(mesh=1x1\), and the Ray cluster has 4"):
        RayEngines(ServeConfig.load(None, **small, replicas=5))


def test_devices_that_other_jobs_hold(cluster: Any, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    from jaxserve.ray.engines import RayEngines

    monkeypatch.setattr("jaxserve.ray.replica.PLACING", 0.5)
    other = placement_group([{"CPU": 3}])
    assert other.wait(30)
    until(lambda: cluster.available_resources().get("CPU") == 1.0)  # Ray reports what is free a little later
    engines = RayEngines(ServeConfig.load(None, **{**small, "mesh": "1x2"}))
    try:
        with pytest.raises(InvalidValue, match="replica 0 needs 2 CPU and 1 are free in the Ray cluster: other jobs"):
            engines.wait()
    finally:
        engines.close()
        remove_placement_group(other)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    monkeypatch.delitem(sys.modules, "jaxserve.ray", raising=False)
    with pytest.raises(ImportError, match=r"ray is not installed: pip install .*\[ray\]'") as found:
        importlib.import_module("jaxserve.ray")
    assert isinstance(found.value, InvalidValue)


def test_a_cluster_outlives_the_thread_that_asked_for_it(repo: Path) -> None:
    """Linux kills processes with the thread that has started them, where they ask for that as Ray's do."""
    code = """if True:
        import threading, time
        import ray
        from jaxserve.ray.cluster import connect
        from tests.ray.conftest import left

        asking = threading.Thread(target=connect, args=("local", 1))
        asking.start()
        asking.join()
        time.sleep(0.5)
        assert len(left()) == 2, left()
        ray.shutdown()
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, cwd=repo)
