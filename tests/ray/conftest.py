"""Tests with a Ray cluster on this machine: `pytest -n 0 -m ray tests/ray`, where the extra `ray` is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.live import ALONE

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; Ray's own warnings are not ours."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if importlib.util.find_spec("ray") is None:
                item.add_marker(pytest.mark.skip("ray is not installed: pip install '.[ray]'"))


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Settings of a small engine of the demo model."""
    return {"mesh": "1x1", **ALONE}


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    """Let engines in Ray's processes emulate as many devices as they need."""
    before = os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    yield
    if before is not None:
        os.environ["JAX_NUM_CPU_DEVICES"] = before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """The module of Ray, connected to a cluster of four CPUs, which ends with the tests of a file."""
    import ray

    from jaxserve.ray.cluster import own_options

    ray.init(address="local", num_cpus=4, log_to_driver=False, **own_options())
    yield ray
    ray.shutdown()
    assert not left(), "Ray leaves processes behind"


def left() -> list[str]:
    """Return the Ray processes that this one has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and ("raylet" in (text := command.read_text()) or "gcs_server" in text):
                found.append(text)
    return found
