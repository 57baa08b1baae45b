"""The interface of an attention backend: a module with `supports` and `make`, and the Spec passed to them.

Letters: T tokens, S rows, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Protocol, TypedDict

import jax

from pallas_kernels.choice import Here
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.norms import HeadNorms
from pallas_kernels.rope import Turn

# Keys and values of one layer, or only a latent: each [N, B, K, D], or [N, K, B, D] for XLA on a CPU.
Pool = tuple[jax.Array, ...]


@dataclass(frozen=True)
class AttentionSpec(Here):
    """The attention of a model on one shard: dtypes, heads, page size, windows."""

    dtype: str  # of activations, and of pools unless `kv_dtype` is set
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page: int  # B
    windows: tuple[int | None, ...] = (None,)  # distinct windows of the model's layers; None: a layer without one
    # MLA: leading columns of the keys that are the values, with one array per layer and one kv head; 0: not MLA
    latent: int = 0
    kv_dtype: str = ""  # of pools, if it is not `dtype`; 8-bit pools have scales

    @property
    def stored(self) -> str:
        """The dtype of pools."""
        return self.kv_dtype or self.dtype

    def shape(self, queries: int) -> AttentionShape:
        """Return what the configs of Hopper kernels are chosen for, for rows of up to `queries` tokens.

        The number of rows is unknown until the step, so configs must not depend on it.
        """
        sizes = 1, self.heads, self.kv_heads, self.head_dim, self.page, queries
        return AttentionShape(*sizes, self.dtype, self.stored, self.cores, self.latent)


class ScoreOptions(TypedDict):
    """The options of scores that every attention function takes."""

    scale: float
    window: int | None
    softcap: float | None
    scales: Scales | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "k", "v", "qkv", "turn", "norms", "sinks", "scales"),
    meta_fields=("scale", "window", "softcap"),
)
@dataclass(frozen=True)
class AttentionInputs:
    """What one layer attends with, besides its pool and the step's work."""

    q: jax.Array  # [T, H, D]
    k: jax.Array  # [T, K, D]
    v: jax.Array | None  # [T, K, D]; None: k holds the values too (a latent), and the pool is one array
    turn: Turn | None  # rotates q and k; None: no rotation
    _: KW_ONLY
    scale: float  # of scores
    window: int | None = None  # number of keys a query sees, its own included
    softcap: float | None = None  # a score s becomes softcap * tanh(s / softcap)
    sinks: jax.Array | None = None  # [H], see sinks.py
    # Of the kv heads of 8-bit pools. Latents have none: k is stored in an 8-bit pool as it is, so the caller divides k
    # by its scales, and multiplies q and the mixed values by them.
    scales: Scales | None = None
    # [T, K, (G + 2) * D]: q, k and v as the projection returns them, if nothing but `norms` was applied to them since;
    # a backend that reads it saves splitting it, and the norms.
    qkv: jax.Array | None = None
    norms: HeadNorms | None = None

    @property
    def options(self) -> ScoreOptions:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "scales": self.scales}


class Attention(Protocol):
    """One bucket's attention, on one shard or on all shards of a mesh."""

    def plan(self, ragged: Ragged) -> Any:
        """Plan what all layers of a step share: a pytree, made inside the jitted step."""

    def __call__(self, inputs: AttentionInputs, pool: Pool, work: Any) -> tuple[jax.Array, Pool]:
        """Rotate queries and keys, write keys and values to the pool, and attend.

        Returns the mixed values [T, H, D] and the updated pool. With a latent cache, the mixed
        values have D columns, or only the first `AttentionSpec.latent`.
        """


class Backend(Protocol):
    """A family of kernels."""

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None, or the reason why it cannot run `spec`."""

    def make(self, spec: AttentionSpec | None, decode: bool, few: bool = False) -> Attention:
        """Build the attention of a bucket.

        `decode`: every program row is exactly one token. `few`: no row has more than 16 tokens.
        """
