"""Backends are chosen with their reasons logged, and the attention of every backend follows the same rules."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.config import ServeConfig
from pallas_kernels import tuned
from pallas_kernels.attention import api as dispatch
from pallas_kernels.attention import mosaic_gpu, tpu
from pallas_kernels.attention.api import (
    BACKENDS,
    AttentionInputs,
    AttentionSpec,
    Choice,
    Unsupported,
    attention,
    resolve,
)
from pallas_kernels.choice import ORDER
from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic.spec import AttentionShape as Wanted
from pallas_kernels.ops.paged_attention.hopper import decode as decode_kernel
from pallas_kernels.ops.paged_attention.hopper import prefill as prefill_kernel
from pallas_kernels.ops.paged_attention.hopper.decode import Config
from tests.support.kernels.ragged import deal, make
from tests.support.kernels.reference import attention as reference
from tests.support.kernels.reference import rotate, written

CPU = AttentionSpec("float32", platform="cpu", heads=4, kv_heads=2, head_dim=16, page=16)
H200 = AttentionSpec(
    "bfloat16", platform="gpu", heads=32, kv_heads=8, head_dim=128, page=64, device="NVIDIA H200", capability="9.0"
)
V6E = AttentionSpec("bfloat16", platform="tpu", heads=32, kv_heads=8, head_dim=128, page=64, device="TPU v6 lite")
PAGE, POOL, DIM, SCALE = 4, 48, 8, 0.3


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_cpu_uses_xla_without_asking_other_backends() -> None:
    assert resolve(CPU) == Choice("xla", CPU)


def test_pools_of_8_bits_are_for_kernels_too() -> None:
    for stored in ("float8_e4m3fn", "int8"):
        for spec, backend in ((H200, "mosaic_gpu"), (V6E, "tpu")):
            assert resolve(replace(spec, kv_dtype=stored)).backend == backend
    assert resolve(replace(H200, kv_dtype="float16")).refusals[0][1].startswith("spec.kv_dtype=")
    assert "pools of float16" in (tpu.supports(replace(V6E, kv_dtype="float16")) or "")


def test_orders_and_names_agree_with_the_settings() -> None:
    hint = typing.get_type_hints(ServeConfig)["attention_backend"]
    assert set(typing.get_args(hint)) == {"auto", *BACKENDS}
    assert all(order[-1] == "xla" and set(order) <= set(BACKENDS) for order in ORDER.values())


def test_what_is_refused_falls_through_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.mosaic_gpu, "supports", lambda spec: "page=8 is too small")
    choice = resolve(replace(H200, page=8))
    assert choice.backend == "xla" and choice.refusals == (("mosaic_gpu", "page=8 is too small"),)


def test_a_latent_cache_goes_to_xla_where_no_kernel_reads_it_and_says_why() -> None:
    choice = resolve(replace(V6E, kv_heads=1, head_dim=576, latent=512))
    assert choice.backend == "xla" and [name for name, _ in choice.refusals] == ["tpu"]
    assert "latent KV cache" in choice.refusals[0][1]
    choice = resolve(replace(H200, kv_heads=1, head_dim=32 + 16, latent=32))
    assert choice.backend == "xla" and "spec.values=32 must be a multiple of 128" in choice.refusals[0][1]


def test_a_named_backend_never_falls_back() -> None:
    with pytest.raises(Unsupported, match=r"'mosaic_gpu' cannot run here: .*; allowed: auto, xla"):
        resolve(CPU, "mosaic_gpu")
    with pytest.raises(Unsupported, match=r"'cuda' is unknown; allowed: auto, mosaic_gpu, tpu, xla"):
        resolve(CPU, "cuda")
    assert resolve(H200, "xla") == Choice("xla", H200)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "cpu"}, "it needs a GPU; this is cpu"),
        ({"capability": "8.9", "device": "NVIDIA L4"}, r"Hopper \(compute capability 9.0\); NVIDIA L4 has 8.9"),
        ({"capability": ""}, "NVIDIA H200 has unknown"),
        ({"page": 8}, "pages of 8 tokens; it reads pages of 16, 32, 64, 128, 256"),
        ({"dtype": "float32"}, "must be bfloat16 or float16"),
        ({"head_dim": 80}, "must be 64, 128"),
        ({"head_dim": 192}, "must be 64, 128 or 256"),
        ({"heads": 6, "kv_heads": 4}, "must be a multiple of"),
        ({"kv_heads": 1, "head_dim": 576, "latent": 512, "kv_dtype": "float32"}, "must be float8_e4m3fn, int8 or"),
        ({"heads": 17, "kv_heads": 1, "head_dim": 576, "latent": 512, "kv_dtype": "int8"}, "at most 16 heads"),
        ({"kv_heads": 2, "head_dim": 576, "latent": 512}, "spec.kv_heads=2 must be 1"),
    ],
)
def test_hopper_says_why_not(changes: dict[str, Any], reason: str) -> None:
    assert resolve(H200) == Choice("mosaic_gpu", H200)
    assert re.search(reason, mosaic_gpu.supports(replace(H200, **changes)) or "")


@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (8, 2), (16, 16), (8, 1), (5, 1), (64, 4)])
def test_hopper_has_configs_for_what_is_served(page: int, dim: int, heads: tuple[int, int]) -> None:
    assert resolve(replace(H200, page=page, head_dim=dim, heads=heads[0], kv_heads=heads[1])).backend == "mosaic_gpu"


def test_measured_configs_win_over_heuristics(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Wanted(1, 32, 8, 128, 64)
    key = tuned.key_of(spec)
    entry = {"op": "decode", **key, "us": 1.0, "config": {"queries": 1, "tile": 64, "stages": 2, "consumers": 1}}
    monkeypatch.setattr(tuned, "entries", lambda device: (entry,) if tuned.name_of(device) == "h200" else ())
    found = tuned.best("decode", spec, "NVIDIA H200", Config)
    assert found is not None and (found.stages, found.consumers) == (2, 1)
    assert tuned.best("prefill", spec, "NVIDIA H200", Config) is None
    assert tuned.best("decode", replace(spec, page=16), "NVIDIA H200", Config) is None
    assert tuned.best("decode", spec, "NVIDIA H100 80GB HBM3", Config) is None
    entry["config"]["stages"] = 512  # more than shared memory holds
    assert tuned.best("decode", spec, "NVIDIA H200", Config) is None


@pytest.mark.parametrize("few", [False, True])
def test_hopper_plans_each_row_once_and_rows_of_one_token_as_such(few: bool) -> None:
    rows = [(1, 40), (3, 70), (1, 1), (16, 16)] + ([] if few else [(17, 30), (40, 40)])
    tables = deal(rows, page=16, pool=64)
    ragged = make(rows, tables, page=16, pool=64, tokens=96, padded_rows=8)
    attention = mosaic_gpu.MosaicAttention(replace(H200, page=16), decode=False, few=few)
    work = jax.jit(attention.plan)(ragged)
    decoded = np.asarray(work.decode[0].splits) > 0
    if few:
        assert not work.prefill and list(np.flatnonzero(decoded)) == list(range(len(rows)))
        return
    longer = np.asarray(work.prefill[0].place) >= 0
    for row, (length, _) in enumerate(rows):
        mine = np.asarray(ragged.rows) == row
        assert decoded[row] == (length == 1) and np.all(longer[mine] == (length > 1))


LOOKUPS = [(op, queries) for op, several in mosaic_gpu.LOOKED_UP.items() for queries in several]


@pytest.mark.parametrize(("op", "queries"), LOOKUPS)
def test_the_engine_finds_the_entry_of_each_spec_that_it_looks_up(
    op: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write an entry that no heuristic would choose for one spec: it is found for this spec only."""
    module = {"decode": decode_kernel, "prefill": prefill_kernel}
    wanted = {(name, spec.queries): spec for name, spec in mosaic_gpu.tuning_specs(H200)}
    assert set(wanted) == set(LOOKUPS)
    spec = wanted[op, queries]
    chosen = list(module[op].candidates(spec))[-1]
    entry = {"op": op, **tuned.key_of(spec), "us": 1.0, "config": asdict(chosen)}
    monkeypatch.setattr(tuned, "entries", lambda device: (entry,))
    for name, other in LOOKUPS:
        config = mosaic_gpu._config(name, module[name], H200, other)
        heuristic = module[name].heuristic(wanted[name, other])
        assert chosen != heuristic or name != op
        assert config == (chosen if (name, other) == (op, queries) else heuristic)


def reachable(entry: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what a model with the heads, page size and dtypes of an entry looks up."""
    served = replace(
        H200, heads=entry["heads"], kv_heads=entry["kv_heads"], head_dim=entry["dim"], page=entry["page"],
        dtype=entry["dtype"], kv_dtype=entry["kv_dtype"],
    )  # fmt: skip
    return mosaic_gpu.tuning_specs(served)


def test_entries_that_no_lookup_finds_are_reported() -> None:
    specs = mosaic_gpu.tuning_specs(H200)
    found = [{"op": op, **tuned.key_of(spec)} for op, spec in specs]
    lost = [{**found[-1], "queries": 8192}, {**found[0], "queries": 4}, {**found[0], "op": "other"}]
    assert tuned.unreachable([*found, *lost], specs) == lost
    assert all(tuned.unreachable([entry], reachable(entry)) == [] for entry in found)


def test_files_of_measured_configs_are_whole() -> None:
    """Check also that every file with entries says where they were measured."""
    for path in Path(tuned.__file__).parent.glob("*.json"):
        read = json.loads(path.read_text())
        assert tuned.name_of(read["device"]) == path.stem and (read["measured"] or not read["entries"])
        assert len(tuned.entries(read["device"])) == len(read["entries"])
        for entry in read["entries"]:
            assert {"op", "config", "us", *tuned.KEYS} <= set(entry)
            assert not tuned.unreachable([entry], reachable(entry)), "the engine never looks this entry up"


def step(decode: bool) -> tuple[Any, ...]:
    """Return the arguments of an attention except its work, and the step."""
    rows = [(1, 6), (1, 7), (1, 8)] if decode else [(1, 6), (3, 7), (2, 8)]
    ragged = make(rows, deal(rows, page=PAGE, pool=POOL), page=PAGE, pool=POOL)
    tokens = len(ragged.rows)
    pool = values(POOL, PAGE, 4, DIM, seed=1), values(POOL, PAGE, 4, DIM, seed=2)
    angle = ragged.positions[:, None, None] * values(1, 1, DIM // 2, seed=3)
    turn = np.cos(angle), np.sin(angle)
    return values(tokens, 8, DIM), values(tokens, 4, DIM), values(tokens, 4, DIM), turn, pool, ragged


def program(
    one: dispatch.Attention, q: Any, k: Any, v: Any, turn: Any, pool: Any, ragged: Ragged, **options: Any
) -> Any:
    return one(AttentionInputs(q, k, v, turn, scale=SCALE, **options), pool, one.plan(ragged))


@pytest.mark.parametrize("decode", [True, False])
def test_split_heads_compute_the_same(decode: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    one, other = (jax.jit(partial(program, attention(m, decode=decode)))(*step(decode)) for m in (None, mesh))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_sink_takes_its_share_of_each_softmax(tp: int, decode: bool) -> None:
    q, k, v, turn, pool, ragged = step(decode)
    one, sinks = attention(Mesh(np.array(jax.devices()[:tp]), ("tp",)), decode=decode), values(8, seed=4)
    got, _ = jax.jit(partial(program, one))(q, k, v, turn, pool, ragged, sinks=sinks)
    pools = [written(part, x, ragged.write) for part, x in zip(pool, (rotate(k, turn), v), strict=True)]
    mixed, lse = reference(rotate(q, turn), *pools, ragged, scale=SCALE)
    total = np.exp(lse)
    np.testing.assert_allclose(got, mixed * (total / (total + np.exp(sinks)))[..., None], atol=1e-5, rtol=0)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_latent_is_key_and_value(tp: int, decode: bool) -> None:
    q, k, _, _, pool, ragged = step(decode)
    latent, held = (np.repeat(x[..., :1, :], tp, axis=-2) for x in (k, pool[0]))  # each shard has a copy
    one = attention(Mesh(np.array(jax.devices()[:tp]), ("tp",)), decode=decode)
    got, (after,) = jax.jit(partial(program, one))(q, latent, None, None, (held,), ragged)
    want = written(held, latent, ragged.write)
    np.testing.assert_array_equal(after, want)
    np.testing.assert_allclose(got, reference(q, want, want, ragged, scale=SCALE)[0], atol=1e-5, rtol=0)


def test_no_turn_is_no_rotation() -> None:
    q, k, v, _, pool, ragged = step(True)
    still = jnp.ones((3, 1, DIM // 2)), jnp.zeros((3, 1, DIM // 2))
    got = [jax.jit(partial(program, attention()))(q, k, v, turn, pool, ragged) for turn in (None, still)]
    for a, b in zip(*map(jax.tree.leaves, got), strict=True):
        np.testing.assert_array_equal(a, b)
