"""How long the products of a mixture of experts take: our kernel in both forms, the XLA path, `ragged_dot`, torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import compat
from pallas_kernels.hopper import grouped
from pallas_kernels.interpret import interpreter
from pallas_kernels.plan.experts import Groups
from pallas_kernels.xla.grouped import grouped_matmul as by_xla

from .first import reference
from .session import Session, normal, reading

MOST = 8e-3  # relative error that rounding explains


@dataclass(frozen=True)
class Case:
    """Gate and up of a layer: tokens that choose `chosen` experts each, any as likely as any other."""

    tokens: int
    experts: int = 128
    chosen: int = 8
    width: int = 2048
    outputs: int = 1536

    @property
    def name(self) -> str:
        return f"experts {self.tokens} tokens"

    def routed(self) -> np.ndarray:
        draw = np.random.default_rng(0)
        return np.stack([draw.permutation(self.experts)[: self.chosen] for _ in range(self.tokens)]).astype(np.int32)

    def moved(self) -> float:
        """Bytes: weights of experts that are chosen, rows in and out."""
        touched = len(np.unique(self.routed()))
        rows = self.tokens * self.chosen
        return 2.0 * (touched * self.width * self.outputs + rows * (self.width + self.outputs))

    def flops(self) -> float:
        return 2.0 * self.tokens * self.chosen * self.width * self.outputs


def cases(dry: bool) -> list[Case]:
    """Qwen3-30B-A3B; dry, both forms of the kernel at sizes that an interpreter can do."""
    if dry:
        return [Case(5, 3, 2, 64, 128), Case(80, 2, 1, 64, 128)]
    return [Case(1), Case(64), Case(256), Case(1024), Case(4096)]


def measure(session: Session) -> None:
    for case in cases(session.dry):
        session.part(case.name, lambda case=case: _case(session, case))


def _case(session: Session, case: Case) -> None:
    if session.dry and not compat.DETECTS_RACES:
        raise NotImplementedError(f"a dry run needs the interpreter of jax 0.11; this is {jax.__version__}")
    told = interpreter() if session.dry else None
    chosen = jnp.asarray(case.routed().reshape(-1))
    spec = grouped.Spec(len(chosen), case.experts, case.width, case.outputs, cores=2 if session.dry else grouped.CORES)
    config = grouped.heuristic(spec)
    work = jax.jit(lambda chosen: grouped.plan(chosen, case.experts))(chosen)
    x = normal((len(chosen), case.width), jnp.bfloat16, 1)
    weight = normal((case.experts, case.width, case.outputs), jnp.bfloat16, 2) * jnp.bfloat16(case.width**-0.5)
    rows = x[work.source]

    def mosaic(x: jax.Array, weight: jax.Array, work: Groups) -> jax.Array:
        return grouped.grouped_matmul(x, weight, work, config=config, interpret=told)

    def tiles(x: jax.Array, weight: jax.Array, work: Groups) -> jax.Array:
        return by_xla(x, weight, work, tile=config.rows)

    def ragged(x: jax.Array, weight: jax.Array, work: Groups) -> jax.Array:
        return lax.ragged_dot(x, weight, -(-work.sizes // grouped.ALIGN) * grouped.ALIGN)

    label = "mosaic swapped" if config.swapped else "mosaic"
    found: list[tuple[str, Callable[..., Any]]] = [(label, mosaic), ("xla tiles", tiles)]
    if case.tokens <= 64:  # it computes every expert for every row
        found.append(("ragged_dot", ragged))
    for name, call in found:
        error = _error(jax.jit(call)(rows, weight, work), x, weight, chosen, work)
        assert error <= MOST, f"{name}: relative error {error:.2e} is more than {MOST:.0e}"
        turns = 4 if name == "ragged_dot" else 4 * session.turns(case.moved() / session.ceilings.copy)
        took = session.seconds(reading(call, turns), (rows, [(weight,)], (work,)), turns)
        session.add(case.name, name, took, moved=case.moved(), flops=case.flops(), error=error)
    if not session.dry:
        session.part(f"{case.name}: torch", lambda: _torch(session, case))


def _error(out: Any, x: Any, weight: Any, chosen: Any, work: Groups) -> float:
    """Of some pairs, in float64 on the host."""
    some = np.random.default_rng(1).permutation(len(chosen))[:64]
    doubles = reference().doubles
    got = doubles(out[work.place[some]])
    want = np.stack([doubles(x[p]) @ doubles(weight[int(chosen[p])]) for p in some])
    return float(reference().error(got, want))


def _torch(session: Session, case: Case) -> None:
    """Its grouped product of the same sizes, where this torch has one."""
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

    took = session.seconds(loop, (), 20)
    session.add(case.name, "torch grouped_mm", took, moved=case.moved(), flops=case.flops())
