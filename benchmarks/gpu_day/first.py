"""Before anything else: what the device is, whether it computes rightly, and its ceilings."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.extend  # platform_version
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import executable
from .device import limited
from .part import Run
from .timing import COPY, MATMUL, MOSAIC, Timing, interpreter_or_none, normal

HANGS = 40.0  # seconds for compiling and running it


def measure(run: Run) -> None:
    """Record the device, sanity, ceilings, the first kernel and an executable that was compiled elsewhere.

    Without the fact `mosaic`, later parts leave the kernels of this repository out.
    """
    device(run)
    run.each(
        {
            "sanity": partial(sanity, run),
            "first kernel": partial(first_kernel, run),
            "copy ceiling": partial(copy, run),
            "matmul ceiling": partial(matmul, run),
            "traveled executable": partial(executable.load, run),
        }
    )


def device(run: Run) -> None:
    """Record what jax sees, and that it computes something."""
    here = jax.devices()[0]
    if not run.dry and here.platform != "gpu":
        raise RuntimeError(f"jax runs on {here.platform}: its CUDA plugin does not work here")
    run.fact("device", here.device_kind)
    run.fact("platform version", jax.extend.backend.get_backend().platform_version)
    run.fact("memory bytes", (here.memory_stats() or {}).get("bytes_limit"))
    run.fact("one and one", int(jnp.ones(2, jnp.int32).sum()))


def sanity(run: Run) -> None:
    """Compare eager and jitted programs with numpy. Raises AssertionError if they differ."""
    from tests.support.kernels import reference

    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((256, 256), np.float32) for _ in range(2))
    index = draw.integers(0, 256, 97)
    checks: dict[str, tuple[Any, Any, float]] = {
        "product": (lambda x, y: jnp.matmul(x, y, precision="highest"), a @ b, 1e-4),
        "product bf16": (lambda x, y: jnp.matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)), a @ b, 2e-2),
        "gather": (lambda x, y: x[index] + y[:97], a[index] + b[:97], 1e-6),
        "cumsum": (lambda x, y: jnp.cumsum(x + y, axis=0), np.cumsum(a + b, axis=0, dtype=np.float64), 1e-5),
    }
    for name, (program, want, most) in checks.items():
        for how, called in (("eager", program), ("jit", jax.jit(program))):
            got = np.asarray(called(jnp.asarray(a), jnp.asarray(b)).astype(jnp.float32))
            error = float(reference.error(got, want))
            run.row("sanity", check=name, how=how, error=error, most=most)
            assert error <= most, f"{how} {name} is wrong: relative error {error:.2e}, at most {most:.0e}"


def first_kernel(run: Run) -> None:
    """Compare one decode kernel with float64, and record the fact `mosaic` if it is right."""
    from tests.gpu.test_numerics import DECODE

    interpreter_or_none(run.dry)
    with limited(1e3 if run.dry else HANGS):
        DECODE["one row"]()
    run.fact(MOSAIC, True)


def _rounds(run: Run, loop: Any, x: Any, per: int) -> float:
    """Return the seconds of one of the `per` rounds of a loop that donates and returns its arrays."""
    x = jax.block_until_ready(loop(x))
    times = []
    for _ in range(2 if run.dry else 20):
        began = time.perf_counter()
        x = jax.block_until_ready(loop(x))
        times.append(time.perf_counter() - began)
    return median(times) / per


def copy(run: Run) -> None:
    """Measure the copy bandwidth: read and write four arrays of 512 MiB in turn, in place."""
    size, per = (1 << 16, 2) if run.dry else (1 << 28, 20)
    arrays = [normal((size,), jnp.bfloat16, i) for i in range(4)]

    def rounds(arrays: list[jax.Array]) -> list[jax.Array]:
        return lax.fori_loop(0, per, lambda _, all_: [x + jnp.bfloat16(1) for x in all_], arrays)

    took = _rounds(run, jax.jit(rounds, donate_argnums=0), arrays, 4 * per)
    moved = 2.0 * size * 2
    run.fact(COPY, moved / took / 1e12)
    Timing(run).add("ceiling", "copy", [took, took], moved=moved)


def matmul(run: Run) -> None:
    """Measure the FLOP rate of bfloat16 matmuls of 8192 x 8192."""
    size, per = (128, 2) if run.dry else (8192, 20)
    weight = normal((size, size), jnp.bfloat16, 1) * jnp.bfloat16(size**-0.5)

    # Two products an iteration: with one, XLA copies its result. The weight is an argument, not a constant to compile.
    def rounds(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.fori_loop(0, per // 2, lambda _, x: (x @ weight) @ weight, x)

    loop = jax.jit(rounds, donate_argnums=0)
    took = _rounds(run, lambda x: loop(x, weight), normal((size, size), jnp.bfloat16, 2), per)
    flops = 2.0 * size**3
    run.fact(MATMUL, flops / took / 1e12)
    Timing(run).add("ceiling", "matmul", [took, took], moved=3.0 * 2 * size**2, flops=flops)
