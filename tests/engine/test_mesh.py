"""Meshes, memory and startup: requested, refused and shared devices."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.memory import kv, room
from jaxserve.engine.memory.transfer import cut, piece_sizes
from jaxserve.engine.programs import compat
from jaxserve.engine.programs.mesh import plan_mesh, sub_meshes
from jaxserve.engine.startup.build import ExecutorConfig, build_executors, random_init, resolve, temporaries
from jaxserve.engine.startup.compiled import compile_counter, use_persistent_cache
from jaxserve.models import registry
from jaxserve.models.dummy import random_weights
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.policy import Role
from tests.support.engine.steps import LENGTH, Job, alone, executors, settings_of

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED


@pytest.mark.parametrize(
    ("text", "options", "roles"),
    [
        ("1x1", {}, (M,)),
        ("2x1", {}, (P, D)),
        ("2x4", {}, (P, D)),
        ("4x2", {}, (P, P, D, D)),
        ("4x2", {"prefill": 1}, (P, D, D, D)),
        ("4x2", {"mode": "colocated"}, (M, M, M, M)),
        ("1x8", {}, (M,)),
        ("3x1", {}, (P, D, D)),
    ],
)
def test_meshes_are_parsed(text: str, options: dict[str, Any], roles: tuple[Role, ...]) -> None:
    plan = plan_mesh(text, **options)
    assert plan.roles == roles and str(plan) == text
    meshes = sub_meshes(plan)
    used = [device for mesh in meshes for device in mesh.devices.flat]
    assert len(set(used)) == len(used) == plan.devices
    assert [dict(mesh.shape) for mesh in meshes] == [{"tp": plan.tp}] * plan.instances


@pytest.mark.parametrize("text", ["4", "x2", "0x1", "2x", "axb", ""])
def test_invalid_meshes_are_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match=f"mesh={text!r} must be RxT"):
        plan_mesh(text)


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"16x2 needs 32 devices, but jax has already started with \d+ on CPU. Set"):
        sub_meshes(plan_mesh("16x2"))


def test_accelerators_are_shared_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:  # hashable, as a device is
        platform = "gpu"

    gpu = Gpu()
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    with pytest.raises(InvalidValue, match=r"2x1 needs 2 devices, but there are 1 \(gpu\).*--share-devices"):
        sub_meshes(plan_mesh("2x1"))
    assert [list(mesh.devices) for mesh in sub_meshes(plan_mesh("2x1"), share_devices=True)] == [[gpu], [gpu]]
    with pytest.raises(InvalidValue, match="1x2 needs 2 devices, but there are 1"):
        sub_meshes(plan_mesh("1x2"), share_devices=True)


def test_devices_are_emulated_in_a_fresh_process() -> None:
    code = """
import logging; logging.basicConfig(level=logging.INFO, format="%(message)s")
from jaxserve.engine.programs.mesh import plan_mesh, sub_meshes
print([[d.id for d in m.devices.flat] for m in sub_meshes(plan_mesh("3x2"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(kv.__file__).parents[2])},
        check=True,
    )
    assert done.stdout.strip() == "[[0, 1], [2, 3], [4, 5]]"
    assert "emulating 6 CPU devices for mesh 3x2" in done.stderr


def test_a_vocabulary_that_tp_does_not_divide_gives_the_same_tokens(tiny: Path) -> None:
    spec = replace(registry.load_spec(tiny), vocab=97)
    config = ExecutorConfig(spec, random_init(), plan_mesh("1x1"), 8, 32, LENGTH, page_size=4, kv_cache_memory=1 << 18)
    jobs = [Job((5, 6, 96, 8)) for _ in range(2)]
    for job, mesh in zip(jobs, ("1x1", "1x4"), strict=True):
        (made,) = build_executors(replace(config, mesh=plan_mesh(mesh), warm=False))
        alone(made, job, 8)
        assert made.state.weights["head"].addressable_shards[0].data.shape[0] == -(-97 // int(mesh[2:]))
    assert jobs[0].output == jobs[1].output


def test_equal_instances_share_programs(tmp_path: Path) -> None:
    """Guard compat.share_programs: jax must take a program compiled for other devices from its cache."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    from jax.experimental.compilation_cache import compilation_cache

    try:
        compilation_cache.reset_cache()
        use_persistent_cache(tmp_path)
        assert compat.share_programs() and compat.backend_started()
        program, counter = jax.jit(lambda x: (x @ x.T).sum() + 17), compile_counter()
        made, loaded = [], []
        for ids in ((0, 1), (4, 5), (3, 2)):
            mesh = Mesh(np.array([jax.devices()[i] for i in ids]), ("tp",))
            x = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(mesh, PartitionSpec("tp", None)))
            start = counter.compilations_total, counter.cache_loads_total
            result = program(x)
            assert float(result) == 81 and {d.id for d in result.devices()} == set(ids)
            made.append(counter.compilations_total - start[0])
            loaded.append(counter.cache_loads_total - start[1])
        assert (made, loaded) == ([1, 0, 0], [0, 1, 1])
    finally:
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_pool_sizes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = registry.load_spec(tiny)
    each = 2 * 2 * 4 * 2 * 8 * 4  # k and v, layers, B, K, D, float32
    assert kv.page_bytes(spec, 4, "float32") == each
    monkeypatch.setattr(kv, "free_memory", lambda: 4 << 30)
    assert kv.cpu_pool_bytes(None, 4) == (1 << 30) // 4
    monkeypatch.setattr(kv, "free_memory", lambda: 40 << 30)
    assert kv.cpu_pool_bytes(None, 2) == 1 << 30
    assert kv.cpu_pool_bytes(640, 2) == 320
    sizes = {kv.fit_pages(spec, 4, "float32", pool_bytes=each * n, max_model_len=64) for n in range(1000, 1024)}
    assert sizes == {992}  # small differences in free memory do not change the programs
    with pytest.raises(InvalidValue, match=r"holds 3 pages of 4 tokens .* the 16 that max_model_len=64 needs"):
        kv.fit_pages(spec, 4, "float32", pool_bytes=each * 3, max_model_len=64)
    with pytest.raises(InvalidValue, match=r"raise kv_cache_memory$"):  # and no word of a max_model_len of 0
        kv.fit_pages(spec, 4, "float32", pool_bytes=each - 1, max_model_len=64)
    with pytest.raises(InvalidValue, match="max_model_len=500 is above the model's 128 positions"):
        executors(tiny, max_model_len=500)
    assert 0 < room.free_memory() <= room.whole_memory()


def test_weights_beyond_all_memory_are_refused_before_any_is_made(tiny: Path) -> None:
    sizes = {"vocab_size": 1 << 24, "hidden_size": 1 << 18, "num_attention_heads": 1 << 12, "num_hidden_layers": 1000}
    spec = registry.spec_from_config({**registry.read_config(tiny), **sizes})  # each is allowed alone
    with pytest.raises(InvalidValue, match=r"weights take \d{14,} bytes in float32, and this machine has \d+:"):
        build_executors(
            replace(settings_of(tiny, "1x1", spec=spec), load=lambda *_: pytest.fail("weights were loaded"))
        )


def test_the_pool_of_an_accelerator_fits_its_memory() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    size = {"utilization": 0.5, "weights": 100, "temporaries": 50, "memory": 1000}
    assert kv.device_pool_bytes(mesh, sharing=1, **size) == 2 * 350
    assert kv.device_pool_bytes(mesh, sharing=2, **size) == 2 * 175
    with pytest.raises(InvalidValue, match=r"gpu_memory_utilization=0.5 of 1000 bytes .* weights take 600"):
        kv.device_pool_bytes(mesh, sharing=1, **size | {"weights": 600})
    with pytest.raises(InvalidValue, match="does not report its memory"):
        kv.device_pool_bytes(mesh, sharing=1, **size | {"memory": None})


def test_temporaries_are_measured_before_the_pool_is_allocated(tiny: Path) -> None:
    spec, mesh = registry.load_spec(tiny), Mesh(np.array(jax.devices()[:1]), ("tp",))
    config = ExecutorConfig(spec, random_init(), plan_mesh("1x1"), 4, 32, 64, page_size=4, persistent_cache=False)
    measured = temporaries(resolve(config, spec, mesh, jnp.float32), random_weights(spec, jnp.float32, [mesh])[0])
    assert 4 * 96 * 2 + 32 * 32 * 4 < measured < 1 << 20


def test_chunks_of_a_transfer_buffer() -> None:
    assert piece_sizes(LENGTH) == (1, 4, 16, 64) and piece_sizes(10) == (1, 4, 16)
    for count in range(1, 200):
        pieces = cut(range(count), (1, 4, 16, 64))
        assert [page for _, pages in pieces for page in pages] == list(range(count))
        assert all(size >= len(pages) for size, pages in pieces)
        assert len(pieces) <= count // 64 + 1
