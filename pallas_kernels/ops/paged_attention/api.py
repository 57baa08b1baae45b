"""The interface of an attention backend: a module with `supports` and `make`, and the Spec passed to them.

Letters: T tokens, S rows, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from pallas_kernels.choice import Here
from pallas_kernels.layout import Ragged, Scales
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


class Attention(Protocol):
    """One bucket's attention, on one shard or on all shards of a mesh."""

    def plan(self, ragged: Ragged) -> Any:
        """Plan what all layers of a step share: a pytree, made inside the jitted step."""

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
        qkv: jax.Array | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[jax.Array, Pool]:
        """Rotate q [T, H, D] and k [T, K, D] by `turn`, write k and v [T, K, D] to the pool, and attend.

        Returns the mixed values [T, H, D] and the updated pool. With a latent cache, the mixed
        values have D columns, or only the first `Spec.latent`.

        `window`: number of keys a query sees, its own included. `softcap`: a score s becomes
        softcap * tanh(s / softcap). `sinks` [H]: see sinks.py. `v` None: k [T, K, D] holds the
        values too, and the pool is one array. `scales`: scales of the kv heads of 8-bit pools.
        Latents have none: k is stored in an 8-bit pool as it is, so the caller divides k by its
        scales, and multiplies q and the mixed values by them. `qkv`: q, k and v as the projection
        returns them, [T, K, (G + 2) * D], if nothing but `norms` was applied to them since; a backend
        that reads it saves splitting it, and the norms.
        """


class Backend(Protocol):
    """A family of kernels."""

    def supports(self, spec: AttentionSpec) -> str | None:
        """Return None, or the reason why it cannot run `spec`."""

    def make(self, spec: AttentionSpec | None, decode: bool, few: bool = False) -> Attention:
        """Build the attention of a bucket.

        `decode`: every program row is exactly one token. `few`: no row has more than 16 tokens.
        """
