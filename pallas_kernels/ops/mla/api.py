"""Attention to a latent KV cache (MLA) on NVIDIA Hopper: RoPE and KV write by XLA, then one kernel.

Rows with more tokens than a block takes are cut into slices, each a row to the kernel. XLA does the
write because at decode it is one small fusion together with the norm that produces the latent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import tuned
from pallas_kernels.layout import Ragged
from pallas_kernels.mosaic.spec import AttentionShape, why_not
from pallas_kernels.mosaic.support import interpreter_of
from pallas_kernels.ops.kv_write.xla import write_latent
from pallas_kernels.ops.paged_attention.api import AttentionInputs, AttentionSpec, Pool
from pallas_kernels.ops.paged_attention.sinks import with_sinks
from pallas_kernels.rope import rotate

MANY = 64  # query tokens of a row that may be a prompt: enough to fill the products


def refused(spec: AttentionSpec) -> str | None:
    """Return None, or the reason why the kernel cannot run `spec`, in steps of single tokens or in others."""
    steps = (True, False)
    return next((why for decode in steps if (why := why_not(_config(spec, decode), _shape(spec, decode)))), None)


def _shape(spec: AttentionSpec, decode: bool) -> AttentionShape:
    return spec.shape(1 if decode else MANY)


def _config(spec: AttentionSpec, decode: bool) -> Any:
    from pallas_kernels.ops.mla import hopper

    return tuned.chosen("mla", hopper, _shape(spec, decode), spec)


@dataclass(frozen=True)
class MlaAttention:
    """Attention of one bucket to a latent KV cache, by the Hopper kernel."""

    spec: AttentionSpec
    decode: bool

    def plan(self, ragged: Ragged) -> tuple[Ragged, tuple[Any, ...]]:
        """Plan the step once per distinct window; layers with the same window share a plan."""
        config = _config(self.spec, self.decode)
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
            config=_config(self.spec, self.decode),
            interpret=interpreter_of(self.spec),
        )
        return (mixed if sinks is None else with_sinks(mixed, lse, sinks)), (latents,)
