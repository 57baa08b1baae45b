"""Decode attention over pages on Hopper: 1 to 16 query tokens a row. Bound by memory: what counts is the stream of KV.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G]   over the keys j that t sees

The G query heads of a kv head, and the row's query tokens, are packed into the M rows of one product, so every key is
read once. Rows are split over the keys by the plan (plan/decode.py), partial results are float32 and are put together
by combine.py. Floor: bytes of K and V over the bandwidth; arithmetic stays below it up to M = 64.

Letters: T tokens, S rows, P pages per row, N pages in the pool, B page size, H query heads, K kv heads, G = H / K,
D head dim, Q most query tokens of a row, M rows of the product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.aot.cases import Case, shapes
from pallas_kernels.hopper.decode_launch import attend
from pallas_kernels.hopper.decode_shape import MEETING, Shape
from pallas_kernels.hopper.fragments import ROWS
from pallas_kernels.hopper.spec import CORES, SMEM, Spec, allowed
from pallas_kernels.interpret import Interpret
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.plan.decode import DecodeWork, plan_decode

WGMMA_ROWS = 64


@dataclass(frozen=True)
class Config:
    """How one shape is computed. `plan` makes the work that `paged_decode` of the same config wants."""

    # Products of warps, of 16 rows and up (jax >= 0.11; of 8-bit pools any jax, 16 rows); else of a warpgroup, of 64.
    warps: bool = False
    queries: int = 1  # Q
    tile: int = 64  # tokens of keys at a time
    stages: int = 4  # tiles on the way
    consumers: int = 2  # warpgroups that compute
    workers: int = CORES // 8  # blocks per kv head and block of query tokens
    p_in_smem: bool = True  # weights reach the second product through shared memory; see `validate`

    def plan(self, ragged: Ragged, *, page: int, window: int | None = None) -> DecodeWork:
        """Once per step; all layers of one window share it."""
        return plan_decode(ragged, page=page, queries=self.queries, tile=self.tile, workers=self.workers, window=window)

    def validate(self, spec: Spec) -> None:
        """Raises ValueError, naming the value, where this config cannot compute the spec."""
        if spec.heads % spec.kv_heads or spec.group > WGMMA_ROWS:
            raise ValueError(f"{spec.heads=} must be a multiple of {spec.kv_heads=}, at most {WGMMA_ROWS} times it")
        if spec.dim % 64 or not 64 <= spec.dim <= 256:
            raise ValueError(f"{spec.dim=} must be 64, 128, 192 or 256")
        if spec.page % 8 or not 8 <= spec.page <= 256:
            raise ValueError(f"{spec.page=} must be a multiple of 8 up to 256")
        if self.tile % 64 or (self.tile % spec.page and spec.page % self.tile):
            raise ValueError(f"{self.tile=} must be a multiple of 64, and a multiple or a divisor of {spec.page=}")
        if self.stages % self.consumers or self.stages < self.consumers:
            raise ValueError(f"{self.stages=} must be a multiple of {self.consumers=}: a slot has one consumer")
        if not 1 <= self.queries <= 16:
            raise ValueError(f"{self.queries=} must be between 1 and 16")
        if self.warps and not (compat.HAS_MMA or spec.quantised):
            raise ValueError(f"{self.warps=} needs jax 0.11 or later; this is {jax.__version__}")
        if self.warps and spec.quantised and self.block(spec) * spec.group > ROWS:
            raise ValueError(
                f"{self.warps=} with {spec.kv_dtype=} is for {ROWS} rows, not {self.block(spec)} * {spec.group}"
            )
        if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            raise ValueError(f"{spec.dtype=} must be bfloat16 or float16")
        if not spec.quantised and jnp.dtype(spec.kv_dtype) != jnp.dtype(spec.dtype):
            raise ValueError(f"{spec.kv_dtype=} must be float8_e4m3fn, int8 or {spec.dtype=}")
        if (size := self.smem_bytes(spec)) > SMEM:
            raise ValueError(f"{self} needs {size} bytes of shared memory for {spec}; a block has {SMEM}")

    def block(self, spec: Spec) -> int:
        """Query tokens that one block takes."""
        return min(self.queries, WGMMA_ROWS // spec.group)

    def blocks(self, spec: Spec) -> int:
        return -(-self.queries // self.block(spec))

    def rows(self, spec: Spec) -> int:
        """M"""
        used = self.block(spec) * spec.group
        return next(m for m in (16, 32, 64) if used <= m) if self.warps else WGMMA_ROWS

    def smem_bytes(self, spec: Spec) -> int:
        """Shared memory of a block, barriers and alignment included."""
        wide = 2  # bytes of what the products take
        ring = 2 * self.stages * self.tile * spec.dim * (1 if spec.quantised else wide)
        rest = 2 * self.rows(spec) * spec.dim * wide + 4096
        if spec.quantised and self.warps:
            return ring + rest + self.consumers * (64 * (MEETING + 8) + 128) * 4
        weights = self.consumers * self.rows(spec) * self.tile * wide if self.warps or self.p_in_smem else 0
        widened = self.consumers * self.tile * spec.dim * wide if spec.quantised else 0
        return ring + rest + weights + widened


def heuristic(spec: Spec, *, warps: bool | None = None) -> Config:
    """A config for the spec that is expected to be good; `warps` None chooses by the rows of the product."""
    packed = spec.queries * spec.group
    if warps is None:
        warps = packed <= ROWS if spec.quantised else compat.HAS_MMA and packed <= 32
    # The mixed values are held in registers, 128 of a thread for D = 256: more than three warpgroups a block leave it.
    consumers = 1 if spec.dim > 128 else 2
    config = Config(warps=warps, queries=spec.queries, consumers=consumers)
    blocks = config.blocks(spec)
    config = replace(config, workers=max(1, spec.cores // (spec.kv_heads * blocks)))
    for stages in (8, 6, 4, 2):
        deep = replace(config, stages=stages)
        if deep.smem_bytes(spec) <= SMEM:
            return deep
    return replace(config, stages=1, consumers=1)


def candidates(spec: Spec) -> Iterator[Config]:
    """Configs worth timing for the spec, the heuristic first; the compile gate drops those that spill."""
    best = heuristic(spec)
    yield best
    bodies = (True, False) if compat.HAS_MMA or spec.quantised else (False,)
    for share in (1, 2):  # blocks on a core at a time
        some = (
            replace(best, warps=warps, consumers=consumers, tile=tile, stages=stages, workers=best.workers * share)
            for warps, consumers, tile, stages in product(bodies, (1, 2), (64, 128), (2, 3, 4, 6, 8))
        )
        for config in allowed(some, spec):
            if config != best and share * config.smem_bytes(spec) <= SMEM:
                yield config


def paged_decode(
    q: jax.Array,  # [T, H, D]
    k_pool: jax.Array,  # [N, B, K, D]
    v_pool: jax.Array,  # [N, B, K, D]
    ragged: Ragged,
    work: DecodeWork,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
    config: Config,
    interpret: Interpret = None,
) -> tuple[jax.Array, jax.Array]:
    """Mixed values [T, H, D] in the dtype of q and lse [T, H]; zeros and MASKED for tokens of rows not in `work`.

    `work` is `config.plan(ragged, page=B, window=window)`. Pools must hold finite numbers everywhere, also where
    nothing was written: what a masked key holds is multiplied by zero.
    """
    rows, (_, page, kv_heads, dim) = ragged.lengths.shape[0], k_pool.shape
    spec = Spec(rows, q.shape[1], kv_heads, dim, page, config.queries, q.dtype, k_pool.dtype)
    config.validate(spec)
    if spec.quantised != (scales is not None):
        raise ValueError(f"pools of {k_pool.dtype} and {scales=} do not fit: 8-bit pools have scales, others none")
    if work.workers != config.workers or work.row.shape[0] != config.workers + rows:
        raise ValueError(f"the work is of {work.workers} workers and {config.workers=}; plan with this config")
    shape = _shape(spec, config, scale, window, softcap, interpret)
    return attend(shape, q, (k_pool, v_pool), ragged, work, scales, kv_heads=kv_heads, blocks=config.blocks(spec))


def _shape(
    spec: Spec, config: Config, scale: float, window: int | None, softcap: float | None, interpret: Interpret
) -> Shape:
    rows, block = config.rows(spec), config.block(spec)
    return Shape(
        rows=rows,
        packed=min(rows, -(-block * spec.group // 8) * 8),
        group=spec.group,
        block=block,
        dim=spec.dim,
        page=spec.page,
        tile=config.tile,
        stages=config.stages,
        consumers=config.consumers,
        dtype=jnp.dtype(spec.compute_dtype),
        kv_dtype=jnp.dtype(spec.kv_dtype),
        warps=config.warps,
        p_in_smem=config.p_in_smem,
        scale=scale,
        window=window,
        softcap=softcap,
        scaled=spec.quantised,
        interpret=interpret,
    )


# H, K and D of a shard of Llama 3; and whether it is compiled in every run of the gate.
MODELS = {"8b": ((32, 8, 128), True), "8b-tp4": ((8, 2, 128), False), "70b-tp4": ((16, 2, 128), False)}


def cases() -> list[Case]:
    """Every config in use, for the compile gate: pages, dtypes, query tokens and head dims of what is served."""
    found: list[Case] = []
    for model, ((heads, kv_heads, dim), usual) in MODELS.items():
        spec = Spec(64, heads, kv_heads, dim, 64)
        found += _both(model, spec)
        for page in (16, 128):
            found += _both(model, replace(spec, page=page), usual=usual)
        for queries in (4, 16):
            found += _both(model, replace(spec, queries=queries), usual=usual)
        found += _both(model, replace(spec, dtype=jnp.float16, kv_dtype=jnp.float16), usual=usual)
        for stored in (jnp.float8_e4m3fn, jnp.int8):
            found += _both(model, replace(spec, kv_dtype=stored), usual=usual)
    for dim in (64, 256):
        found += _both(f"d{dim}", Spec(64, 16, 4, dim, 64))
        for stored in (jnp.float8_e4m3fn, jnp.int8):
            found.append(_case(f"d{dim}", Spec(64, 16, 4, dim, 64, kv_dtype=stored), warps=True, usual=False))
    eight = Spec(64, 32, 8, 128, 64, 4, kv_dtype=jnp.float8_e4m3fn)
    found.append(_case("softcap window", eight, warps=True, usual=False, window=4096, softcap=50.0))
    found += _both("d256 window", Spec(64, 4, 1, 256, 64, queries=16), window=512)
    found += _both("softcap window", Spec(64, 16, 8, 128, 64), window=4096, softcap=50.0)
    return found


def _both(name: str, spec: Spec, *, usual: bool = True, **options: Any) -> Iterator[Case]:
    """One spec with products of warps and of warpgroups."""
    for warps in (False, True):
        if warps and spec.queries * spec.group > (ROWS if spec.quantised else 32):
            continue
        yield _case(name, spec, warps, usual=usual, **options)


def _case(name: str, spec: Spec, warps: bool, *, usual: bool = True, **options: Any) -> Case:
    stored = "" if spec.kv_dtype == spec.dtype else f" {jnp.dtype(spec.kv_dtype).name}"
    return Case(
        name=f"decode {name} {'mma' if warps else 'wgmma'} {jnp.dtype(spec.dtype).name}{stored}"
        f" page{spec.page} q{spec.queries}",
        program=partial(_step, spec=spec, config=heuristic(spec, warps=warps), **options),
        arguments=_arguments(spec),
        needs=frozenset({"mma" if warps else "wgmma", "tma"}),
        least_jax=(0, 11) if warps and not spec.quantised else (0, 10),
        usual=usual,
    )


def _arguments(spec: Spec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, the pools, their scales, and the fields of `Ragged`; a context of up to 32768 tokens, 4096 pages."""
    tokens, pool = spec.rows * spec.queries, (4096, spec.page, spec.kv_heads, spec.dim)
    rows = [((spec.rows,), jnp.int32)] * 3
    scales = [((spec.kv_heads,), jnp.float32)] * 2 if spec.quantised else []
    return shapes(
        ((tokens, spec.heads, spec.dim), spec.dtype),
        (pool, spec.kv_dtype),
        (pool, spec.kv_dtype),
        *[((tokens,), jnp.int32)] * 3,
        *rows,
        ((spec.rows, 32768 // spec.page), jnp.int32),
        *scales,
    )


def _step(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, *rest: jax.Array, spec: Spec, config: Config, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Plan and attend, as one layer of a step does."""
    fields = len(Ragged._fields)
    ragged, scales = Ragged(*rest[:fields]), Scales(*rest[fields:]) if spec.quantised else None
    work = config.plan(ragged, page=spec.page, window=options.get("window"))
    return paged_decode(q, k_pool, v_pool, ragged, work, scale=spec.dim**-0.5, scales=scales, config=config, **options)
