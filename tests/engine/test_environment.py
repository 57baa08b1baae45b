"""Variables that jax reads when it starts: set before, never over the user's, and the memory that follows."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.memory import kv
from jaxserve.engine.startup import environment
from jaxserve.engine.startup.environment import LOADING, SHARES, prepare, reserved_share, variables
from tests.support.examples import examples

NAMES = (*SHARES, LOADING)
# A process that stops where the engine prepares its environment, and tells what jax has done by then.
PROBE = """
import os, sys
from jaxserve.engine.startup import environment
def stop(*given):
    from jaxserve.engine.programs.compat import backend_started
    print("prepared", backend_started(), *given, flush=True)
    os._exit(0)
environment.prepare = stop
"""
START = {
    "LLM": "import jaxserve; jaxserve.LLM(gpu_memory_utilization=0.5, tokenizer_object=object())",
    "serve": "from jaxserve.run import main; "
    "main(['--port', '0', '--api-server-count', '0', '--gpu-memory-utilization', '0.5'])",
    "profile": "from jaxserve.cli.main import main; main(['profile', '--gpu-memory-utilization', '0.5'])",
}


def run(code: str, repo: Path, **set_here: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repo, env={**inherited, **set_here}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["LLM", "serve", pytest.param("profile", marks=pytest.mark.full)])
def test_the_environment_is_prepared_before_jax_starts(name: str, repo: Path) -> None:
    assert "prepared False 0.5" in run(PROBE + START[name], repo)


def test_the_module_needs_no_jax_and_jax_reads_what_it_sets(repo: Path) -> None:
    code = """
import json, os, sys
from jaxserve.engine.startup.environment import prepare
prepare(0.9, gpus=2)
light = "jax" not in sys.modules
from jaxlib import xla_client
print(json.dumps([light, os.environ["CUDA_MODULE_LOADING"], xla_client.generate_pjrt_gpu_plugin_options()]))
"""
    light, loading, options = json.loads(run(code, repo))
    assert light and loading == "EAGER" and options["memory_fraction"] == 0.95
    _, _, options = json.loads(run(code, repo, XLA_PYTHON_CLIENT_MEM_FRACTION="0.3"))
    assert options["memory_fraction"] == 0.3


@settings(max_examples=examples(60))
@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0.5", ""])), st.floats(0.01, 1.0), st.integers(0, 8))
def test_what_a_user_has_set_is_kept(given_here: dict[str, str], share: float, gpus: int) -> None:
    found = variables(share, given_here, gpus)
    assert not {*given_here} & {*found}
    assert not ({*given_here} & {*SHARES} and {*found} & {*SHARES})
    assert (found.get(LOADING) == "EAGER") == (gpus > 1 and LOADING not in given_here)
    after = {**given_here, **found}
    assert variables(share, after, gpus) == {}  # a second engine of the process sets nothing


@settings(max_examples=examples(60))
@given(st.floats(0.01, 1.0))
def test_jax_reserves_what_the_engine_uses_and_a_little_more(utilization: float) -> None:
    share = reserved_share(variables(utilization, {}, 1))
    assert utilization - 1e-4 <= share <= max(utilization, min(utilization + 0.05, 0.95)) + 1e-4


def test_a_jax_that_has_started_is_told_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here: dict[str, str] = {}
    monkeypatch.setattr(environment, "started", lambda: "gpu")
    with caplog.at_level(logging.WARNING):
        prepare(0.9, environment=here, gpus=2)
    assert here == {}
    assert "without XLA_CLIENT_MEM_FRACTION=0.95 CUDA_MODULE_LOADING=EAGER" in caplog.text
    assert "weights and KV cache have 75% of the GPU's memory" in caplog.text
    caplog.clear()
    prepare(0.9, environment={SHARES[1]: "0.8", LOADING: "LAZY"}, gpus=2)  # nothing is lost
    monkeypatch.setattr(environment, "started", lambda: "cpu")
    prepare(0.9, environment=here, gpus=2)
    assert here == {} and not caplog.text


def test_jax_is_seen_to_have_started() -> None:
    jax.devices()
    assert environment.started() == "cpu"


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert environment.gpus_here(tmp_path) == 3


def pool(utilization: float, reserved: float, limit: int, weights: int = 16, temporaries: int = 2) -> int:
    """Return the pool of one device that reports `limit` bytes."""
    device: Any = SimpleNamespace(memory_stats=lambda: {"bytes_limit": limit})
    mesh: Any = SimpleNamespace(devices=np.array([device], object), size=1)
    return kv.device_pool_bytes(
        mesh, utilization=utilization, weights=weights, temporaries=temporaries, sharing=1, reserved=reserved
    )


def test_the_pool_is_the_utilization_of_the_whole_memory() -> None:
    """As in vLLM: 0.9 of a GPU with 140 GB, less weights and temporaries, by the share that is reserved by default."""
    whole = 140_000
    assert pool(0.9, 0.95, int(0.95 * whole)) == pytest.approx(0.9 * whole - 18, abs=2)
    assert pool(0.5, 0.55, int(0.55 * whole)) == pytest.approx(0.5 * whole - 18, abs=2)
    assert pool(0.9, 0.75, int(0.75 * whole)) == pytest.approx(0.95 * 0.75 * whole - 18, abs=2)  # jax started first
    assert pool(0.9, 1.0, whole) == pytest.approx(0.9 * whole - 18, abs=2)  # a TPU


@settings(max_examples=examples(60))
@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.integers(10**4, 10**12))
def test_a_pool_leaves_room_in_what_jax_reserves(utilization: float, reserved: float, whole: int) -> None:
    limit = int(whole * reserved)
    size = pool(utilization, reserved, limit, 0, 0)
    assert size <= min(utilization * whole, kv.USABLE * limit) + 2
    assert size >= min(utilization * whole, kv.USABLE * limit) * 0.999 - 2
