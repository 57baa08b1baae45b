"""Attention to a latent KV cache (MLA) on NVIDIA Hopper: RoPE and KV write by XLA, then one kernel.

Rows with more tokens than a block takes are cut into slices, each a row to the kernel. XLA does the
write because at decode it is one small fusion together with the norm that produces the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.layout import Ragged
from pallas_kernels.ops.kv_write.xla import write_latent
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.rope import rotate

MANY = 64  # query tokens of a row that may be a prompt: enough to fill the products


def refused(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why the kernel cannot run `spec`, in steps of single tokens or in others."""
    try:
        for decode in (True, False):
            config, wanted = _config(spec, decode)
            config.validate(wanted)
    except ValueError as reason:
        return str(reason)
    return None


def _config(spec: AttentionSpec, decode: bool) -> tuple[Any, Any]:
    """Return the measured config or, without one, the heuristic config, and the spec it is chosen for."""
    from pallas_kernels.mosaic.spec import AttentionShape as Wanted
    from pallas_kernels.ops.mla import hopper

    # The number of rows is unknown until the step, so configs must not depend on it.
    wanted = Wanted(
        rows=1,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dim=spec.head_dim,
        page=spec.page,
        queries=1 if decode else MANY,
        dtype=jnp.dtype(spec.dtype),
        kv_dtype=jnp.dtype(spec.stored),
        cores=spec.cores,
        values=spec.latent,
    )
    measured = None if spec.interpret else tuned.best("mla", wanted, spec.device, hopper.Config)
    return measured or hopper.heuristic(wanted), wanted


@dataclass(frozen=True)
class MlaAttention:
    """Attention of one bucket to a latent KV cache, by the Hopper kernel."""

    spec: AttentionSpec
    decode: bool

    def plan(self, ragged: Ragged) -> tuple[Ragged, tuple[Any, ...]]:
        """Plan the step once per distinct window; layers with the same window share a plan."""
        config, _ = _config(self.spec, self.decode)
        works = tuple(
            config.plan(ragged, page=self.spec.page, window=window, short=self.decode) for window in self.spec.windows
        )
        return ragged, works

    def __call__(
        self, inputs: AttentionInputs, pool: Pool, work: tuple[Ragged, tuple[Any, ...]]
    ) -> tuple[jax.Array, Pool]:
        from pallas_kernels.ops.mla.hopper import paged_mla

        assert inputs.v is None and inputs.scales is None, "a latent has no separate values and no scales"
        (ragged, works), sinks = work, inputs.sinks
        latents = write_latent(pool[0], rotate(inputs.k, inputs.turn), ragged.write)
        mixed, lse = paged_mla(
            rotate(inputs.q, inputs.turn),
            latents,
            works[self.spec.windows.index(inputs.window)],
            values=self.spec.latent,
            scale=inputs.scale,
            window=inputs.window,
            softcap=inputs.softcap,
            config=_config(self.spec, self.decode)[0],
            interpret=self.spec.interpreter,
        )
        return (mixed if sinks is None else with_sinks(mixed, lse, sinks)), (latents,)
