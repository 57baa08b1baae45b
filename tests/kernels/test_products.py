"""Products with 8-bit weights: the backend is chosen with its reasons, and every backend gives the same product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.quantized import Quantized, einsum, multiplied_by
from pallas_kernels.choice import Unsupported
from pallas_kernels.ops.quantized_matmul.api import (
    MatmulSpec,
    MosaicQuantizedMatmul,
    products,
    resolve_quantized_matmul,
)
from pallas_kernels.ops.quantized_matmul.hopper import QuantizedSpec, supports
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
