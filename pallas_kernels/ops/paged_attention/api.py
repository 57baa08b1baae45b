"""What a backend is: a module with `supports` and `make`, and what is asked of it.

Letters: T tokens, S rows, N pages in the pool, B page size, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from pallas_kernels.choice import Here
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.rope import Turn

# Keys and values of one layer, or a latent alone; each [N, B, K, D], for XLA on a CPU [N, K, B, D].
Pool = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Spec(Here):
    """What an engine asks of its attention. Heads are those of one shard."""

    dtype: str  # of activations, and of pools unless `kv_dtype` says otherwise
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page: int  # B
    windows: tuple[int | None, ...] = (None,)  # of the model's layers; None: a layer that sees everything
    latent: int = 0  # columns of the keys that are the values: one array a layer, one kv head (MLA); 0: they are apart
    kv_dtype: str = ""  # of pools, where it is not `dtype`; those of 8 bits come with scales

    @property
    def stored(self) -> str:
        """The dtype of pools."""
        return self.kv_dtype or self.dtype


class Attention(Protocol):
    """One bucket's attention on one shard, or on all shards of a mesh."""

    def plan(self, ragged: Ragged) -> Any:
        """What all layers of a step share: a pytree, made inside the jitted step."""

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
        """Rotate q [T, H, D] and k [T, K, D] by `turn`, write k and v [T, K, D] to the pool, attend.

        Returns the mixed values [T, H, D] and the pool with k and v in it. `window`: keys that a query sees, itself
        included. `softcap`: a score s becomes softcap * tanh(s / softcap). Of a latent the mixed values have D columns,
        or only those of `Spec.latent`.
        `sinks` [H]: see sinks.py. `v` None: k [T, K, D] are values too, and the pool is one array.
        `scales`: of the kv heads, where pools are of 8 bits. Of latents there are none: into a pool of 8 bits goes what
        8 bits say of k, so the caller divides it, and has q and the mixed values multiplied.
        """


class Backend(Protocol):
    """A family of kernels."""

    def supports(self, spec: Spec) -> str | None:
        """None, or why it cannot run what `spec` says."""

    def make(self, spec: Spec | None, decode: bool, few: bool = False) -> Attention:
        """The attention of a bucket; `decode`: every program row is exactly one token; `few`: none has more than 16."""
