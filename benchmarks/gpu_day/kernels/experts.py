"""Time the grouped matmul of mixture-of-experts layers: both forms of the kernel, XLA, `ragged_dot` and torch.

With 8-bit weights only the kernel and the XLA path are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_day.part import Run
from pallas_kernels.ops.grouped_matmul.hopper import matmul as grouped
from pallas_kernels.ops.grouped_matmul.plan import Groups
from pallas_kernels.ops.grouped_matmul.xla import grouped_matmul as by_xla
from tests.support.kernels import reference

from .timing import Timing, interpreter_or_none, normal, reading

MOST = 8e-3  # maximum relative error that rounding explains


@dataclass(frozen=True)
class Case:
    """The fused gate and up projection of a layer, whose tokens are routed to `chosen` uniformly drawn experts each."""

    tokens: int
    experts: int = 128
    chosen: int = 8
    width: int = 2048
    outputs: int = 1536
    stored: str = ""  # dtype of 8-bit weights; "": bfloat16
    scales: int = 1  # number of scales along the width

    @property
    def name(self) -> str:
        kind = f" {self.stored} {'blocks' if self.scales > 1 else 'channels'}" if self.stored else ""
        return f"experts {self.tokens} tokens{kind}"

    def routed(self) -> np.ndarray:
        draw = np.random.default_rng(0)
        return np.stack([draw.permutation(self.experts)[: self.chosen] for _ in range(self.tokens)]).astype(np.int32)

    def moved(self) -> float:
        """Return the bytes that a kernel must move: weights of the chosen experts, rows in and out."""
        touched = len(np.unique(self.routed()))
        rows = self.tokens * self.chosen
        size = 1 if self.stored else 2
        return size * touched * self.width * self.outputs + 2.0 * rows * (self.width + self.outputs)

    def weights(self) -> tuple[jax.Array, jax.Array | None]:
        """Return the weights of all experts and, for 8-bit weights, their scales."""
        shape, size = (self.experts, self.width, self.outputs), self.width**-0.5
        if not self.stored:
            return normal(shape, jnp.bfloat16, 2) * jnp.bfloat16(size), None
        scale = jax.random.uniform(jax.random.key(3), (self.experts, self.scales, self.outputs), minval=0.5 * size)
        return normal(shape, jnp.dtype(self.stored), 2), scale * size

    def flops(self) -> float:
        return 2.0 * self.tokens * self.chosen * self.width * self.outputs


def all_cases(dry: bool) -> list[Case]:
    """Return the cases of Qwen3-30B-A3B, or in a dry run small cases of both kernel forms."""
    if dry:
        return [Case(5, 3, 2, 64, 128), Case(80, 2, 1, 64, 128), Case(5, 3, 2, 128, 128, "int8", 2)]
    narrow = [
        Case(tokens, stored=stored, scales=scales)
        for stored, scales in (("int8", 1), ("float8_e4m3fn", 16))
        for tokens in (1, 64, 256, 4096)
    ]
    return [Case(1), Case(64), Case(256), Case(1024), Case(4096), *narrow]


def measure(run: Run, cases: list[str]) -> None:
    """Time the cases of these names; an error above what rounding explains fails the part."""
    time = Timing(run)
    known = {case.name: case for case in all_cases(run.dry)}
    with time.each() as attempt:
        for name in cases:
            attempt(name, lambda case=known[name]: _case(time, case))
            if not run.dry and not known[name].stored:
                attempt(f"{name}: torch", lambda case=known[name]: _torch(time, case))


def _case(time: Timing, case: Case) -> None:
    told = interpreter_or_none(time.dry)
    chosen = jnp.asarray(case.routed().reshape(-1))
    spec = grouped.GroupedSpec(
        len(chosen), case.experts, case.width, case.outputs, cores=2 if time.dry else grouped.CORES
    )
    if case.stored:
        spec = replace(spec, stored=jnp.dtype(case.stored), scales=case.scales)
    config = grouped.heuristic(spec)
    work = jax.jit(lambda chosen: grouped.plan(chosen, case.experts))(chosen)
    x = normal((len(chosen), case.width), jnp.bfloat16, 1)
    rows, (weight, scale) = x[work.source], case.weights()

    def mosaic(x: jax.Array, weight: jax.Array, scale: Any, work: Groups) -> jax.Array:
        return grouped.grouped_matmul(x, weight, work, scale=scale, config=config, interpret=told)

    def tiles(x: jax.Array, weight: jax.Array, scale: Any, work: Groups) -> jax.Array:
        return by_xla(x, weight, work, tile=config.rows, scale=scale)

    def ragged(x: jax.Array, weight: jax.Array, scale: Any, work: Groups) -> jax.Array:
        return lax.ragged_dot(x, weight, -(-work.sizes // grouped.ALIGN) * grouped.ALIGN)

    label = "mosaic swapped" if config.swapped else "mosaic"
    found: list[tuple[str, Callable[..., Any]]] = [(label, mosaic), ("xla tiles", tiles)]
    if case.tokens <= 64 and not case.stored and not time.dry:  # ragged_dot computes every expert for every row
        found.append(("ragged_dot", ragged))
    for name, call in found:
        error = _error(jax.jit(call)(rows, weight, scale, work), x, weight, scale, chosen, work)
        assert error <= MOST, f"{name}: relative error {error:.2e} is more than {MOST:.0e}"
        turns = 4 if name == "ragged_dot" else 4 * time.turns(time.floor(case.moved(), case.flops()))
        took = time.seconds(reading(call, turns), (rows, [(weight, scale)], (work,)), turns)
        time.add(case.name, name, took, moved=case.moved(), flops=case.flops(), error=error)


def _error(out: Any, x: Any, weight: Any, scale: Any, chosen: Any, work: Groups) -> float:
    """Return the relative error of some (token, expert) pairs against float64 on the host."""
    some = np.random.default_rng(1).permutation(len(chosen))[:64]
    doubles = reference.doubles

    def wide(expert: int) -> np.ndarray:
        plain = doubles(weight[expert])
        return plain if scale is None else plain * np.repeat(doubles(scale[expert]), len(plain) // scale.shape[1], 0)

    got = doubles(out[work.place[some]])
    want = np.stack([doubles(x[p]) @ wide(int(chosen[p])) for p in some])
    return float(reference.error(got, want))


def _torch(time: Timing, case: Case) -> None:
    """Time torch's grouped matmul of the same sizes."""
    import torch

    sizes = np.bincount(case.routed().reshape(-1), minlength=case.experts)
    ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
    x = torch.randn(int(sizes.sum()), case.width, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(case.experts, case.width, case.outputs, dtype=torch.bfloat16, device="cuda")

    def loop() -> Any:
        for _ in range(20):
            torch._grouped_mm(x, weight, offs=ends)
        torch.cuda.synchronize()
        return ()

    took = time.seconds(loop, (), 20)
    time.add(case.name, "torch grouped_mm", took, moved=case.moved(), flops=case.flops())
