"""Which attention an engine runs: chosen once at its start, told with its reasons, local to each shard's heads.

`resolve` picks a backend, `attention` makes its object for the programs of one bucket. An object plans once per step
(`plan`, inside the jitted step) and every layer is handed that work, together with what to rotate, write and attend to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import mosaic_gpu, tpu, xla
from pallas_kernels.choice import Choice, Unsupported
from pallas_kernels.choice import resolve as choose
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.ops.grouped_matmul.api import Experts, XlaExperts
from pallas_kernels.ops.paged_attention.api import Attention as Local
from pallas_kernels.ops.paged_attention.api import Backend, Pool, Spec
from pallas_kernels.ops.quantized_matmul.api import QuantizedMatmul, XlaQuantizedMatmul
from pallas_kernels.rope import Turn

__all__ = ["Attention", "Choice", "Pool", "Spec", "Unsupported", "attention", "heads_first", "pool_row", "resolve"]

BACKENDS: Mapping[str, Backend] = {"mosaic_gpu": mosaic_gpu, "tpu": tpu, "xla": xla}


def resolve(spec: Spec, name: str = "auto") -> Choice:
    """The attention for `spec`: see `choice.resolve`."""
    return choose(spec, name, BACKENDS, "attention")


def pool_row(choice: Choice | None, head_dim: int) -> tuple[int, int]:
    """How many kv heads lie side by side in a row of the pools, and its width, as the kernels of `choice` want it: each
    pool is [N, B, K / heads, width]."""
    return tpu.row(choice.spec) if choice is not None and choice.backend == "tpu" else (1, head_dim)


def heads_first(choice: Choice | None) -> bool:
    """Whether pools are [N, K, B, D] for the kernels of `choice`."""
    return choice is not None and choice.backend == "xla" and xla.heads_first(choice.spec)


class Attention(Local, Protocol):
    """That of one bucket's program, and what else its layers need to know."""

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The devices that share the layers by an axis `tp`; None: one."""

    @property
    def experts(self) -> Experts:
        """The products of a shard's experts."""

    @property
    def products(self) -> QuantizedMatmul:
        """Products with weights of 8 bits."""


def attention(
    mesh: Mesh | AbstractMesh | None = None,
    choice: Choice | None = None,
    *,
    decode: bool = False,
    few: bool = False,
    experts: Experts | None = None,
    products: QuantizedMatmul | None = None,
) -> Attention:
    """The attention of one bucket's program.

    `mesh` with an axis `tp`: heads are split over it and every shard attends to its own pool; None: one device.
    `choice`, `experts`, `products` None: XLA. `decode`: every program row is exactly one token, T = S, lengths 0 or 1.
    `few`: no row has more than 16.
    """
    local = xla.make(None, decode) if choice is None else BACKENDS[choice.backend].make(choice.spec, decode, few)
    pages = P(None, "tp") if heads_first(choice) else P(None, None, "tp")
    return _Sharded(local, mesh, pages, experts or XlaExperts(), products or XlaQuantizedMatmul())


@dataclass(frozen=True)
class _Sharded:
    """Each shard's heads by themselves; the work is the same on all of them."""

    local: Local
    mesh: Mesh | AbstractMesh | None
    pages: P  # of a pool's array
    experts: Experts
    products: QuantizedMatmul

    def plan(self, ragged: Ragged) -> Any:
        return self.local.plan(ragged)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        turn: Turn | None,
        pool: Pool,
        work: Any,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: jax.Array | None = None,
        scales: Scales | None = None,
    ) -> tuple[jax.Array, Pool]:
        if self.mesh is None or self.mesh.shape["tp"] == 1:
            return self.local(
                q, k, v, turn, pool, work, scale=scale, window=window, softcap=softcap, sinks=sinks, scales=scales
            )
        heads, pages = P(None, "tp"), self.pages

        def layer(
            q: jax.Array, k: jax.Array, v: jax.Array | None, turn: Turn | None, pool: Pool, work: Any, heads: Any
        ) -> tuple[jax.Array, Pool]:
            return self.local(q, k, v, turn, pool, work, scale=scale, window=window, softcap=softcap, **heads)

        # Replication is not checked: the loops over pages have trip counts that depend on replicated arrays only.
        run = jax.shard_map(
            layer,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, P(), pages, P(), P("tp")),
            out_specs=(heads, pages),
            check_vma=False,
        )
        mixed, pool = run(q, k, v, turn, pool, work, {"sinks": sinks, "scales": scales})
        return mixed, pool
