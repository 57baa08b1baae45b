"""Which attention an engine runs: chosen once at its start, told with its reasons, local to each shard's heads.

`resolve` picks a backend, `attention` makes its object for the programs of one bucket. An object plans once per step
(`plan`, inside the jitted step) and every layer is handed that work, together with what to rotate, write and attend to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.backends import mosaic_gpu, tpu, xla
from pallas_kernels.backends.base import Attention, Backend, Pool, Spec
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.rope import Turn

__all__ = ["Attention", "Choice", "Pool", "Spec", "Unsupported", "attention", "resolve"]

BACKENDS: Mapping[str, Backend] = {"mosaic_gpu": mosaic_gpu, "tpu": tpu, "xla": xla}
ORDER: Mapping[str, tuple[str, ...]] = {"gpu": ("mosaic_gpu", "xla"), "tpu": ("tpu", "xla")}  # elsewhere: xla


class Unsupported(ValueError):
    """A backend that was asked for by name cannot run here."""


@dataclass(frozen=True)
class Choice:
    """What was resolved, and why not what comes before it."""

    backend: str
    spec: Spec
    refusals: tuple[tuple[str, str], ...] = ()  # (backend, reason), in the order they were asked

    def __str__(self) -> str:
        return self.backend + (" (interpreted)" if self.spec.interpret and self.backend != "xla" else "")


def resolve(spec: Spec, name: str = "auto") -> Choice:
    """The first backend of the platform's order that supports `spec`. One that is named is taken or refused.

    Raises Unsupported with the reason and what there is instead.
    """
    if name != "auto":
        return _named(spec, name)
    refusals: list[tuple[str, str]] = []
    for candidate in ORDER.get(spec.platform, ("xla",)):
        reason = BACKENDS[candidate].supports(spec)
        if reason is None:
            return Choice(candidate, spec, tuple(refusals))
        refusals.append((candidate, reason))
    raise Unsupported("no attention backend can run here: " + "; ".join(f"{one}: {why}" for one, why in refusals))


def _named(spec: Spec, name: str) -> Choice:
    if name not in BACKENDS:
        raise Unsupported(f"attention backend {name!r} is unknown; there are: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].supports(spec)
    if reason is not None:
        able = [other for other, backend in BACKENDS.items() if backend.supports(spec) is None]
        raise Unsupported(f"attention backend {name!r} cannot run here: {reason}; allowed: auto, {', '.join(able)}")
    return Choice(name, spec)


def attention(
    mesh: Mesh | AbstractMesh | None = None, choice: Choice | None = None, *, decode: bool = False, few: bool = False
) -> Attention:
    """The attention of one bucket's program.

    `mesh` with an axis `tp`: heads are split over it and every shard attends to its own pool; None: one device.
    `choice` None: XLA. `decode`: every program row is exactly one token, T = S, lengths 0 or 1. `few`: no row has more
    than 16.
    """
    local = xla.make(None, decode) if choice is None else BACKENDS[choice.backend].make(choice.spec, decode, few)
    if mesh is None or mesh.shape["tp"] == 1:
        return local
    return _Sharded(local, mesh)


@dataclass(frozen=True)
class _Sharded:
    """Each shard's heads by themselves; the work is the same on all of them."""

    local: Attention
    mesh: Mesh | AbstractMesh

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
        heads, pages = P(None, "tp"), P(None, None, "tp")

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
