"""The demo model with 8-bit weights: loss of accuracy, and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.cli.main import dispatch
from jaxserve.config import ServeConfig
from jaxserve.demo import model_path
from jaxserve.engine.programs.backends import resolve_backends
from jaxserve.engine.programs.mesh import plan_mesh
from jaxserve.engine.startup.build import ExecutorConfig, random_init
from jaxserve.errors import InvalidValue
from jaxserve.models import registry
from jaxserve.models.published import published_spec
from jaxserve.models.quantization import FLAG
from jaxserve.yamlio import choices, hints_of
from pallas_kernels.ops.grouped_matmul.api import resolve_experts
from tests.support.engine.perplexity import demo, perplexity, unquantized
from tests.support.engine.steps import Job, alone, executors
from tests.support.examples import cases


@pytest.mark.parametrize("name", cases([name for name in FLAG if name != "fp8"], FLAG))
def test_the_demo_model_loses_at_most_one_percent(name: str) -> None:
    executor = demo(spec=registry.load_spec(model_path()).quantized_as(name))
    tree = executor.state.weights["layers"]
    held, count = (sum(getattr(leaf, what) for leaf in jax.tree.leaves(tree)) for what in ("nbytes", "size"))
    assert held < 1.05 * count, f"{held} bytes for {count} weights"
    found = perplexity(executor, pieces=1)
    assert found != unquantized(1), "no weight was quantized"
    assert abs(found / unquantized(1) - 1) <= 0.01, f"perplexity {found}, unquantized {unquantized(1)}"


def test_weights_and_cache_in_8_bits_together() -> None:
    executor = demo(spec=registry.load_spec(model_path()).quantized_as("int8"), kv_cache_dtype="int8")
    assert abs(perplexity(executor, pieces=1) / unquantized(1) - 1) <= 0.01


def test_a_converted_folder_is_served_like_its_source(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed; pip install '.[orbax]'")
    assert dispatch("convert", ["--model", str(tiny), "--out", str(tmp_path / "made"), "--quantization", "int8"]) == 0
    source = executors(tiny, spec=registry.load_spec(tiny).quantized_as("int8"), warm=False)[0]
    made = executors(tmp_path / "made", warm=False)[0]
    want, found = (alone(executor, Job((5, 17, 40, 2, 9)), 8) for executor in (source, made))
    assert found == want


def test_the_flag_is_checked_at_startup() -> None:
    assert choices(hints_of(ServeConfig)["quantization"]) == (*FLAG,)
    assert ServeConfig(quantization="fp8").quantization == "fp8"
    with pytest.raises(InvalidValue, match="quantization='awq' must be one of int8, fp8, fp8_per_block"):
        ServeConfig(quantization="awq")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "flag", "weights", "block"),
    [
        ("qwen3-30b-a3b", None, "", 0),
        ("qwen3-30b-a3b", "int8", "int8", 0),
        ("deepseek-v2-lite", "fp8_per_block", "float8_e4m3fn", 128),
        ("minimax-m2", None, "float8_e4m3fn", 128),  # as published
        ("gpt-oss-20b", "int8", "", 0),  # its experts are not quantized
    ],
)
def test_the_matmul_of_experts_depends_on_the_dtype_of_their_weights(
    model: str, flag: str | None, weights: str, block: int
) -> None:
    spec = published_spec(model).quantized_as(flag)
    config = ExecutorConfig(spec, random_init(), plan_mesh("1x1"), 1, 16, 16)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    found = resolve_backends(config, spec, jnp.dtype(jnp.bfloat16), mesh).experts
    assert found is not None and (found.spec.weights, found.spec.block) == (weights, block)
    on_hopper = replace(found.spec, platform="gpu", capability="9.0")
    assert resolve_experts(on_hopper).backend == "mosaic_gpu"
