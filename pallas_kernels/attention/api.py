"""Choose an engine's attention backend once, at its start, and shard it over heads.

`resolve` picks a backend; `attention` builds the object that the programs of one bucket call. Each
step calls `plan` once, inside the jitted step, and passes the resulting work to every layer, which
rotates, writes KV and attends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention import mosaic_gpu, tpu, xla
from pallas_kernels.choice import Choice, Unsupported
from pallas_kernels.choice import resolve as choose
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.gated_matmul.api import GatedMatmul
from pallas_kernels.ops.grouped_matmul.api import Experts, XlaExperts
from pallas_kernels.ops.paged_attention.api import Attention as Local
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec, Backend, Pool
from pallas_kernels.ops.quantized_matmul.api import QuantizedMatmul

__all__ = [
    "Attention",
    "AttentionInputs",
    "AttentionSpec",
    "Choice",
    "Pool",
    "Unsupported",
    "attention",
    "heads_first",
    "pool_row",
    "refuses_cascade",
    "resolve",
]

BACKENDS: Mapping[str, Backend] = {"mosaic_gpu": mosaic_gpu, "tpu": tpu, "xla": xla}


def resolve(spec: AttentionSpec, name: str = "auto") -> Choice:
    """Resolve the attention backend for `spec`; see `choice.resolve`."""
    return choose(spec, name, {backend: module.supports for backend, module in BACKENDS.items()}, "attention")


def pool_row(choice: Choice | None, head_dim: int) -> tuple[int, int]:
    """Return how many kv heads share a pool row, and the row's width, for the kernels of `choice`.

    Each pool is [N, B, K / heads, width].
    """
    return tpu.row(choice.spec) if choice is not None and choice.backend == "tpu" else (1, head_dim)


def refuses_cascade(choice: Choice | None) -> str | None:
    """Return None, or the reason why the kernels of `choice` read a shared prefix once per row."""
    if choice is None or choice.backend == "xla":
        return None
    if choice.backend != "mosaic_gpu":
        return f"the attention backend {choice} reads a shared prefix once per row"
    return f"{choice} reads a shared prefix of a latent KV cache (MLA) once per row" if choice.spec.latent else None


def heads_first(choice: Choice | None) -> bool:
    """Return whether the kernels of `choice` expect pools of shape [N, K, B, D]."""
    return choice is not None and choice.backend == "xla" and xla.heads_first(choice.spec)


class Attention(Local, Protocol):
    """The attention of one bucket's program, with the mesh and products that its layers also need."""

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh whose axis `tp` the layers are sharded over; None for one device."""

    @property
    def decode(self) -> bool:
        """Whether every row is one token."""

    @property
    def experts(self) -> Experts:
        """Return the expert products of a shard."""

    @property
    def products(self) -> QuantizedMatmul | None:
        """Return the products with 8-bit weights; None: XLA's."""

    @property
    def mlp(self) -> GatedMatmul | None:
        """Return the gated product of dense feed-forwards; None: XLA's."""


def attention(
    mesh: Mesh | AbstractMesh | None = None,
    choice: Choice | None = None,
    *,
    decode: bool = False,
    few: bool = False,
    experts: Experts | None = None,
    products: QuantizedMatmul | None = None,
    mlp: GatedMatmul | None = None,
) -> Attention:
    """Build the attention of one bucket's program.

    `mesh`: heads are split over its axis `tp`, and every shard attends to its own pool; None for
    one device. `choice`, `experts`, `products`, `mlp`: None for XLA. `decode`: every program row is
    exactly one token, so T = S and lengths are 0 or 1. `few`: no row has more than 16 tokens.
    """
    local = xla.make(None, decode) if choice is None else BACKENDS[choice.backend].make(choice.spec, decode, few)
    pages = P(None, "tp") if heads_first(choice) else P(None, None, "tp")
    return _Sharded(local, mesh, pages, experts or XlaExperts(), products, mlp, decode)


@dataclass(frozen=True)
class _Sharded:
    """An attention backend run per shard on its own heads; the plan is the same on all shards."""

    local: Local
    mesh: Mesh | AbstractMesh | None
    pages: P  # partition of a pool's arrays
    experts: Experts
    products: QuantizedMatmul | None
    mlp: GatedMatmul | None
    decode: bool

    def plan(self, ragged: Ragged) -> Any:
        return self.local.plan(ragged)

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: Any) -> tuple[jax.Array, Pool]:
        if self.mesh is None or self.mesh.shape["tp"] == 1:
            return self.local(inputs, pool, work)
        tokens, by_head, whole = P(None, "tp"), P("tp"), P()  # of arrays [T, heads, ...], [heads] and others
        specs: dict[str, Any] = dict.fromkeys(("q", "k", "v", "qkv"), tokens) | dict.fromkeys(("turn", "norms"), whole)
        specs |= dict.fromkeys(("sinks", "scales"), by_head)
        # shard_map cannot infer replication through the loops over pages, whose trip counts depend on
        # replicated arrays only.
        run = jax.shard_map(
            self.local,
            mesh=self.mesh,
            in_specs=(replace(inputs, **specs), self.pages, whole),
            out_specs=(tokens, self.pages),
            check_vma=False,
        )
        mixed, pool = run(inputs, pool, work)
        return mixed, pool
