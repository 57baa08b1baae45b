"""The dtype of models, and KV caches with another one: accepted values, loss of accuracy, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.capacity.devices import devices
from jaxserve.config import ServeConfig
from jaxserve.engine.memory import calibrate, kv
from jaxserve.engine.startup.build import auto_dtype, random_init
from jaxserve.errors import InvalidValue
from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from jaxserve.yamlio import choices, hints_of
from pallas_kernels.attention.api import attention
from pallas_kernels.layout import Ragged
from tests.support.engine.perplexity import demo, perplexity, unquantized
from tests.support.engine.steps import POOL, executors
from tests.support.examples import cases

SPEC = registry.spec_from_config(
    {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": 64, "sliding_window": 9,
        "max_position_embeddings": 40, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    }
)  # fmt: skip


LATENT = registry.spec_from_config(
    {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 40, "kv_lora_rank": 24,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 2, "topk_method": "greedy",
    }
)  # fmt: skip


def test_the_flag_and_the_engine_accept_the_same_names() -> None:
    assert choices(hints_of(ServeConfig)["kv_cache_dtype"]) == ("auto", *kv.STORED)
    with pytest.raises(InvalidValue, match=r"kv_cache_dtype='fp4' must be one of auto, bfloat16, .*, int8"):
        ServeConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", cases(["fp8"], ["bfloat16", "int8"]))
def test_the_demo_model_loses_at_most_one_percent(name: str) -> None:
    executor = demo(kv_cache_dtype=name)
    assert {str(part.dtype) for pool in executor.state.pools for part in pool} == {kv.STORED[name]}
    found = perplexity(executor, 3)
    assert found != unquantized(3), "the cache was not quantized"
    assert abs(found / unquantized(3) - 1) <= 0.01, f"perplexity {found}, unquantized {unquantized(3)}"


def test_the_same_memory_holds_four_times_the_pages_of_float32(tiny: Path) -> None:
    pages = {name: executors(tiny, kv_cache_dtype=name, warm=False)[0].pages for name in ("auto", "bfloat16", "int8")}
    assert pages["auto"] * 4 == pages["bfloat16"] * 2 == pages["int8"], f"{pages} pages of {POOL} bytes"


def test_instances_share_scales_measured_once(tiny: Path) -> None:
    pair = executors(tiny, "2x2", kv_cache_dtype="int8", warm=False)
    for layer in range(2):
        mine, other = (each.state.weights["layers"][layer]["attention"] for each in pair)
        for name in ("k_scale", "v_scale"):
            assert mine[name].shape == (2,) and mine[name].addressable_shards[0].data.shape == (1,)
            np.testing.assert_array_equal(mine[name], other[name])
            assert (np.asarray(mine[name]) > 0).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_measured_scales_equal_the_largest_cached_values(tp: int) -> None:
    """The measured maxima are those in a float32 pool after the same step."""
    found, pools = measured(SPEC, tp)
    for (k, v), (k_pool, v_pool) in zip(found, pools, strict=True):
        np.testing.assert_allclose(k, np.abs(k_pool).max(axis=(0, 1, 3)), rtol=1e-5)
        np.testing.assert_allclose(v, np.abs(v_pool).max(axis=(0, 1, 3)), rtol=1e-5)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_latent_columns_are_measured_singly_and_rotary_ones_for_any_position(tp: int) -> None:
    found, pools = measured(LATENT, tp)
    for (peak,), (pool,) in zip(found, pools, strict=True):
        largest = np.abs(pool).max(axis=(0, 1, 2))  # [D]
        np.testing.assert_allclose(peak[:24], largest[:24], rtol=1e-5)
        norms = np.hypot(pool[..., 24:28], pool[..., 28:]).max(axis=(0, 1, 2))  # [Z / 2], equal at any position
        np.testing.assert_array_equal(peak[24:28], peak[28:])
        assert (peak[24:28] >= norms * 0.9999).all() and (peak[24:28] <= norms * 2**0.5 * 1.0001).all()


def measured(spec: ModelSpec, tp: int) -> tuple[Any, Any]:
    """Return the measured maxima of each layer, and the float32 pools after the same step."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:tp]), ("tp",))
    spec = replace(spec.for_tp(tp), kv_scales=True)
    (tree,) = random_init(1)(spec, "float32", [mesh])
    found = calibrate.peaks(spec, tree, mesh)
    plain = replace(spec, kv_scales=False)
    count, page = spec.max_positions, 8
    tokens = np.random.default_rng(0).integers(0, spec.vocab, count).astype(np.int32)
    index, one = np.arange(count, dtype=np.int32), np.full(1, count, np.int32)
    table = np.arange(count // page, dtype=np.int32)[None]
    ragged = Ragged(index, np.zeros_like(index), index, np.zeros(1, np.int32), one, one, table)
    shape = spec.cache.shape(count // page, page)
    pools = [(jnp.zeros(shape),) * spec.cache.parts] * spec.layers
    bare = {**tree, "layers": [_without_scales(layer) for layer in tree["layers"]]}
    (bare,) = (jax.device_get(bare),)
    _, pools = jax.jit(partial(registry.forward, plain, attention=attention()))(bare, pools, tokens, ragged)
    return found, jax.device_get(pools)


def _without_scales(layer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: leaf for name, leaf in layer["attention"].items() if not name.endswith("_scale")}
    return {**layer, "attention": kept}


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "dtype"),
    [
        ("gpu", "Tesla T4", "7.5", "float16"),
        ("gpu", "Tesla V100-SXM2-16GB", "7.0", "float16"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "8.0", "bfloat16"),
        ("gpu", "NVIDIA L4", "8.9", "bfloat16"),
        ("gpu", "NVIDIA H200", "9.0", "bfloat16"),
        ("gpu", "NVIDIA B200", "10.0", "bfloat16"),
        ("tpu", "TPU v5 lite", None, "bfloat16"),
        ("cpu", "cpu", None, "float32"),
    ],
)
def test_auto_is_what_the_device_computes_fast(platform: str, kind: str, capability: str | None, dtype: str) -> None:
    device: Any = SimpleNamespace(platform=platform, device_kind=kind)
    if capability is not None:
        device.compute_capability = capability
    assert auto_dtype(device) == dtype
    assert dtype in choices(hints_of(ServeConfig)["dtype"])


def test_plans_know_the_default_of_each_device() -> None:
    assert {name: devices()[name].dtype for name in ("t4", "l4", "h200", "v5e", "cpu")} == {
        "t4": "float16", "l4": "bfloat16", "h200": "bfloat16", "v5e": "bfloat16", "cpu": "float32",
    }  # fmt: skip


@pytest.mark.full
def test_the_demo_model_computes_in_float16() -> None:
    executor = demo(dtype="float16")
    assert {str(part.dtype) for pool in executor.state.pools for part in pool} == {"float16"}
    assert abs(perplexity(executor, 1) / unquantized(1) - 1) <= 0.01


def test_scales_are_rounded_up_to_a_coarse_grid() -> None:
    x = np.array([0.0, 1.0, 1.0000001, 1.01, 1.5, 3.0e-5], np.float32)
    up = calibrate.rounded_up(x)
    assert (up >= x * 0.9999).all() and (up[1:] <= x[1:] * 2 ** (1 / calibrate.STEPS_PER_OCTAVE) * 1.0001).all()
    assert up[0] > 0 and up[1] == up[2] == 1.0
