"""Time gate, up and SwiGLU of a dense layer at decode: the kernel, and XLA's product with its second launch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_day.part import Run
from pallas_kernels.mosaic.spec import CORES
from pallas_kernels.ops.gated_matmul.api import GATES
from pallas_kernels.ops.gated_matmul.cases import MODELS
from pallas_kernels.ops.gated_matmul.hopper import gated_matmul, heuristic, spec_of
from tests.support.kernels.checks.gated_matmul import formula
from tests.support.kernels.reference import error

from .timing import POOLS, Timing, interpreter_or_none, normal, reading

TOKENS = (8, 32, 64, 128, 256, 1024, 2048)
CHECKED = 16  # results of each half that are compared with float64
MOST = 8e-3  # maximum relative error that rounding explains


def cases(dry: bool, model: str) -> dict[str, tuple[int, int, int, str]]:
    """Return tokens, inputs, results and activation of a model's cases; a dry run has one small model."""
    sizes, tokens = ((128, 128, "silu"), TOKENS[:1]) if dry else (MODELS[model], TOKENS)
    return {f"gated {model} t{count}": (count, *sizes) for count in tokens}


def measure(run: Run, model: str) -> None:
    """Time all token counts of a model; an error above what rounding explains fails the part."""
    time = Timing(run)
    with time.each() as attempt:
        for name, case in cases(run.dry, model).items():
            for label in ("mosaic", "xla"):
                attempt(f"{name}: {label}", lambda name=name, case=case, label=label: _case(time, name, case, label))


def _case(time: Timing, name: str, case: tuple[int, int, int, str], label: str) -> None:
    tokens, inputs, results, activation = case
    gate, config = GATES[activation], heuristic(spec_of(tokens, inputs, 2 * results, cores=2 if time.dry else CORES))
    interpret = interpreter_or_none(time.dry) if label == "mosaic" else None

    def call(x: jax.Array, weight: jax.Array) -> jax.Array:
        if label == "mosaic":
            return gated_matmul(x, weight.reshape(inputs, -1), gate=gate, config=config, interpret=interpret)
        both = jnp.einsum("te,epf->tpf", x, weight)
        return gate(both[:, 0], both[:, 1])

    # Enough weights to exceed the level-2 cache.
    count = 2 if time.dry else max(POOLS, -(-(200 << 20) // (4 * inputs * results)))
    weights = [(normal((inputs, 2, results), jnp.bfloat16, i) * jnp.bfloat16(inputs**-0.5),) for i in range(count)]
    x = normal((tokens, inputs), jnp.bfloat16, 99)
    some = np.random.default_rng(0).permutation(results)[:CHECKED]
    got, want = jax.jit(call)(x, *weights[0])[:, some], weights[0][0][:, :, some].reshape(inputs, -1)
    wrong = float(error(got, formula(x, want, activation)))
    assert wrong <= MOST, f"relative error {wrong:.2e} is more than {MOST:.0e}"
    moved, flops = 2.0 * (2 * inputs * results + tokens * (inputs + results)), 4.0 * tokens * inputs * results
    turns = time.turns(time.floor(moved, flops))
    found = time.seconds(reading(call, turns), (x, weights, ()), turns * count)
    time.add(name, label, found, moved=moved, flops=flops, error=wrong)
