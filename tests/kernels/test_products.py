"""Products with 8-bit weights: the choice of the backend, and the Hopper kernel against float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.quantized import Quantized, einsum, multiplied_by
from pallas_kernels.choice import Unsupported
from pallas_kernels.mosaic.spec import SMEM
from pallas_kernels.ops.quantized_matmul.api import (
    MatmulSpec,
    MosaicQuantizedMatmul,
    products,
    resolve_quantized_matmul,
)
from pallas_kernels.ops.quantized_matmul.hopper import (
    Config,
    QuantizedSpec,
    StripWork,
    candidates,
    heuristic,
    supports,
)
from tests.support.examples import examples
from tests.support.kernels.checks.quantized_matmul import SMALL, check
from tests.support.kernels.interpreted import needs_interpreter
from tests.support.kernels.reference import error

H200 = MatmulSpec("bfloat16", "float8_e4m3fn", True, platform="gpu", device="NVIDIA H200", capability="9.0")


@dataclass(frozen=True)
class Told:
    """Compute with XLA, and record the calls."""

    most: int
    shapes: list[Any] = field(default_factory=list, compare=False)

    def __call__(self, x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array | None:
        if len(x) > self.most:
            return None
        self.shapes.append((x.shape, values.shape, scale.shape))
        return einsum("ti,io->to", x, Quantized(values, scale, 0))


def weight(*shape: int, scales: int, dtype: Any = jnp.int8) -> Quantized:
    random = np.random.default_rng(0)
    values = jnp.asarray(np.rint(random.uniform(-100, 100, shape)), dtype)
    return Quantized(values, jnp.asarray(random.uniform(0.001, 0.01, (scales, *shape[1:])), jnp.float32), 0)


def test_scales_of_blocks_are_the_kernels_and_others_are_left_to_xla() -> None:
    assert resolve_quantized_matmul(H200).backend == "mosaic_gpu"
    assert resolve_quantized_matmul(replace(H200, weights="int8")).backend == "mosaic_gpu"
    for changes, reason in (
        ({"blocks": False}, "reads no more bytes"),
        ({"shards": 4}, "split over 4 devices"),
        ({"dtype": "float32"}, "activations are float32"),
        ({"capability": "8.0"}, "it needs Hopper"),
    ):
        choice = resolve_quantized_matmul(replace(H200, **changes))  # type: ignore[arg-type]
        assert choice.backend == "xla" and reason in choice.refusals[0][1]
        with pytest.raises(Unsupported, match=r"'mosaic_gpu' cannot run here: .*; allowed: auto, xla"):
            resolve_quantized_matmul(replace(H200, **changes), "mosaic_gpu")  # type: ignore[arg-type]
    assert isinstance(products(resolve_quantized_matmul(H200)), MosaicQuantizedMatmul)
    assert products(None) is products(resolve_quantized_matmul(H200, "xla")) is None


def test_few_tokens_of_whole_strips_are_taken() -> None:
    def takes(tokens: int, inputs: int, outputs: int, scales: int) -> bool:
        return supports(QuantizedSpec(tokens, inputs, outputs, scales, jnp.bfloat16, jnp.float8_e4m3fn)) is None

    assert takes(1, 4096, 6144, 32) and takes(256, 14336, 4096, 112)
    for refused in ((257, 4096, 6144, 32), (8, 4096, 6100, 32), (8, 96, 128, 3)):
        assert not takes(*refused)
    kernel, (tokens, inputs, outputs, scales) = products(resolve_quantized_matmul(H200)), (257, 256, 128, 2)
    values, scale = jnp.zeros((inputs, outputs), jnp.float8_e4m3fn), jnp.ones((scales, outputs))
    assert kernel is not None and kernel(jnp.zeros((tokens, inputs), jnp.bfloat16), values, scale) is None


def test_a_weight_goes_to_the_backend_that_takes_it_with_its_outputs_together() -> None:
    x, told = jnp.asarray(np.random.default_rng(1).standard_normal((3, 64)), jnp.float32), Told(4)
    plain = weight(64, 2, 16, scales=2)
    tree = multiplied_by({"a": plain, "b": x}, told)
    got = einsum("ti,ipo->tpo", x, tree["a"])
    assert told.shapes == [((3, 64), (64, 32), (2, 32))] and tree["b"] is x
    np.testing.assert_allclose(got, einsum("ti,ipo->tpo", x, plain), rtol=1e-6)
    einsum("ti,ipo->tpo", jnp.tile(x, (2, 1)), tree["a"])  # six tokens
    assert len(told.shapes) == 1
    np.testing.assert_allclose(x @ replace(weight(64, 16, scales=1), by=told), x @ weight(64, 16, scales=1), rtol=1e-6)
    assert len(told.shapes) == 2


@needs_interpreter
def test_the_kernel_computes_what_xla_does() -> None:
    spec = MatmulSpec("float16", "float8_e4m3fn", True, platform="cpu", cores=2, interpret=True)
    one = products(resolve_quantized_matmul(spec, "mosaic_gpu"))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 256)), jnp.float16)
    plain = weight(256, 2, 128, scales=2, dtype=jnp.float8_e4m3fn)
    got = jax.jit(lambda x, weight: einsum("ti,ipo->tpo", x, multiplied_by(weight, one)))(x, plain)
    assert error(got, einsum("ti,ipo->tpo", x, plain)) < 1e-3


@needs_interpreter
@pytest.mark.parametrize(("stored", "scales"), [(jnp.int8, 2), (jnp.float8_e4m3fn, 1)])
def test_strips_that_several_blocks_share(stored: Any, scales: int) -> None:
    check(QuantizedSpec(5, 256, 384, scales, stored=stored), SMALL)


def tokens(count: int) -> tuple[QuantizedSpec, Config]:
    spec = QuantizedSpec(count, 256, 256, 2, stored=jnp.int8, cores=4)
    return spec, replace(heuristic(spec), stages=2)


FORMS = [
    *(
        (QuantizedSpec(8, 256, 256, scales, dtype, stored), replace(SMALL, workers=3))
        for dtype, stored, scales in product((jnp.bfloat16, jnp.float16), (jnp.int8, jnp.float8_e4m3fn), (1, 2, 4))
    ),
    *map(tokens, (1, 8, 9, 16, 33, 64, 128, 130, 256)),
    *(
        (QuantizedSpec(8, 512, 256, 4, stored=jnp.int8), Config(8, depth, stages, workers))
        for stages, workers, depth in ((2, 1, 64), (3, 1, 128), (2, 7, 64), (5, 16, 128))
    ),
]


@pytest.mark.full
@needs_interpreter
@pytest.mark.parametrize(("spec", "config"), FORMS, ids=str)
def test_every_form(spec: QuantizedSpec, config: Config) -> None:
    check(spec, config)


@needs_interpreter
def test_tiles_that_are_freed_before_they_are_read_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the test: a consumer without a fence after its ordinary loads is caught."""
    from pallas_kernels.mosaic import quantized_tile as narrow_tile

    monkeypatch.setattr(narrow_tile, "fence", lambda interpret: None)
    monkeypatch.setattr(narrow_tile.plgpu, "commit_smem", lambda: None)
    with pytest.raises(AssertionError, match="races"):
        check(QuantizedSpec(8, 256, 128, 1), replace(SMALL, workers=1, stages=2))


@settings(deadline=None, max_examples=examples(50))
@given(st.integers(1, 12), st.integers(1, 20), st.integers(1, 140))
def test_every_step_of_every_strip_is_some_blocks_and_shares_are_equal(strips: int, steps: int, workers: int) -> None:
    work = StripWork(strips, steps, workers)
    done = np.zeros((strips, steps), int)
    for strip, first, count in work.items:
        assert count > 0
        done[strip, first : first + count] += 1
    assert np.all(done == 1)
    assert work.cuts[0] == 0 and work.cuts[-1] == len(work.items) <= strips + workers
    shares = [work.items[a:b, 2].sum() for a, b in zip(work.cuts[:-1], work.cuts[1:], strict=True)]
    assert max(shares) - min(shares) <= 1
    for strip, parts in enumerate(work.parts):
        own = parts[parts < len(work.items)]
        assert np.array_equal(own, np.flatnonzero(work.items[:, 0] == strip))


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        (SMALL, {"dtype": jnp.float32}, "must be bfloat16 or float16"),
        (SMALL, {"stored": jnp.uint8}, "must be one of int8, float8_e4m3fn"),
        (SMALL, {"outputs": 200}, "spec.outputs=200 must be a multiple of 128"),
        (SMALL, {"scales": 8}, "divide spec.inputs=256 / spec.scales=8"),
        (SMALL, {"tokens": 257}, "spec.tokens=257 1 to 256"),
        (replace(SMALL, tokens=24), {}, "self.tokens=24"),
        (replace(SMALL, stages=1), {}, "self.stages=1 must be at least 2"),
        (replace(SMALL, stages=64), {}, "bytes of shared memory"),
    ],
)
def test_configs_that_cannot_be_are_named(config: Config, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config.validate(replace(QuantizedSpec(8, 256, 256), **changes))


@pytest.mark.parametrize("tokens", [1, 8, 17, 64, 65, 128, 256])
@pytest.mark.parametrize("size", [(4096, 6144, 32), (14336, 4096, 112), (2048, 5120, 1), (192, 256, 3)])
def test_heuristics_and_candidates_fit(tokens: int, size: tuple[int, int, int]) -> None:
    spec = QuantizedSpec(tokens, *size)
    found = list(candidates(spec))
    assert found[0] == heuristic(spec)
    for config in found:
        config.validate(spec)
        assert config.smem_bytes() <= SMEM
