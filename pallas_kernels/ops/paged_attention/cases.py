"""Compile-gate cases of paged attention for Hopper: decode, shared prefixes and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate.cases import Case, shapes, step_shapes
from pallas_kernels.layout import ARRAYS, Ragged, Scales, SharedPrefixes
from pallas_kernels.mosaic.fragments import ROWS
from pallas_kernels.mosaic.spec import AttentionShape
from pallas_kernels.ops.paged_attention.hopper import cascade, decode, prefill
from pallas_kernels.ops.paged_attention.hopper.decode_block import DecodeShape, Results

# H, K and D of a shard of Llama 3, and whether every run of the gate compiles it.
DECODE_MODELS = {"8b": ((32, 8, 128), True), "8b-tp4": ((8, 2, 128), False), "70b-tp4": ((16, 2, 128), False)}
PREFILL_MODELS = {"8b": (32, 8, 128), "8b-tp4": (8, 2, 128), "70b-tp4": (16, 2, 128)}  # H, K, D of a shard of Llama 3


def cases() -> list[Case]:
    """Return every config in use on Hopper."""
    return [*decode_cases(), *shared_cases(), *prefill_cases()]


def decode_cases() -> list[Case]:
    """Return every decode config in use: pages, dtypes, query tokens and head dims of served models."""
    cases: list[Case] = []
    for model, ((heads, kv_heads, dim), usual) in DECODE_MODELS.items():
        spec = AttentionShape(64, heads, kv_heads, dim, 64)
        cases += _decode_both(model, spec)
        for page in (16, 128):
            cases += _decode_both(model, replace(spec, page=page), usual=usual)
        for queries in (4, 16):
            cases += _decode_both(model, replace(spec, queries=queries), usual=usual)
        cases += _decode_both(model, replace(spec, dtype=jnp.float16, kv_dtype=jnp.float16), usual=usual)
        for stored in (jnp.float8_e4m3fn, jnp.int8):
            cases += _decode_both(model, replace(spec, kv_dtype=stored), usual=usual)
    for dim in (64, 256):
        cases += _decode_both(f"d{dim}", AttentionShape(64, 16, 4, dim, 64))
        for stored in (jnp.float8_e4m3fn, jnp.int8):
            cases.append(
                _decode_case(f"d{dim}", AttentionShape(64, 16, 4, dim, 64, kv_dtype=stored), warps=True, usual=False)
            )
    drafts = AttentionShape(64, 32, 8, 128, 16, 16, kv_dtype=jnp.int8)
    cases.append(_decode_case("8b", drafts, warps=False, usual=False))
    eight = AttentionShape(64, 32, 8, 128, 64, 4, kv_dtype=jnp.float8_e4m3fn)
    cases.append(_decode_case("softcap window", eight, warps=True, usual=False, window=4096, softcap=50.0))
    cases += _decode_both("d256 window", AttentionShape(64, 4, 1, 256, 64, queries=16), window=512)
    cases += _decode_both("softcap window", AttentionShape(64, 16, 8, 128, 64), window=4096, softcap=50.0)
    return cases


def _decode_both(name: str, spec: AttentionShape, *, usual: bool = True, **options: Any) -> Iterator[Case]:
    """Yield one spec with warp-level and with warpgroup products."""
    for warps in (False, True):
        if warps and spec.queries * spec.group > (ROWS if spec.quantized or spec.dim > 64 else 2 * ROWS):
            continue
        yield _decode_case(name, spec, warps, usual=usual, **options)


def _decode_case(name: str, spec: AttentionShape, warps: bool, *, usual: bool = True, **options: Any) -> Case:
    config = decode.heuristic(spec, warps=warps)
    shape = DecodeShape(spec, config, spec.dim**-0.5, options.get("window"), options.get("softcap"), None)
    merges = shape.results is Results.MERGED
    return Case(
        name=f"decode {name} {'mma' if warps else 'wgmma'} {_dtypes(spec)} page{spec.page} q{spec.queries}",
        program=partial(_step, attend=decode.paged_decode, spec=spec, config=config, **options),
        arguments=_arguments(spec, spec.rows * spec.queries),
        needs=frozenset({"mma" if warps else "wgmma", "tma"} | ({"atom"} if merges else set())),
        least_jax=(0, 11) if warps and not spec.quantized else (0, 10),
        usual=usual,
    )


def _dtypes(spec: AttentionShape) -> str:
    return " ".join(dict.fromkeys((spec.dtype.name, spec.kv_dtype.name)))


def _arguments(spec: AttentionShape, tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return q, the pools, the fields of `Ragged`, and scales; contexts of up to 32768 tokens, 4096 pages."""
    pool = ((4096, spec.page, spec.kv_heads, spec.dim), spec.kv_dtype)
    scales = [((spec.kv_heads,), jnp.float32)] * 2 if spec.quantized else []
    step = step_shapes(tokens, spec.rows, 32768 // spec.page)
    return shapes(((tokens, spec.heads, spec.dim), spec.dtype), pool, pool, *step, *scales)


def _step(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *rest: jax.Array,
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    spec: AttentionShape,
    config: Any,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Plan and attend, as one layer of a step does."""
    ragged, scales = Ragged.of(rest[:ARRAYS]), Scales(*rest[ARRAYS:]) if spec.quantized else None
    work = config.plan(ragged, page=spec.page, window=options.get("window"))
    return attend(q, k_pool, v_pool, ragged, work, scale=spec.dim**-0.5, scales=scales, config=config, **options)


def shared_cases() -> Iterator[Case]:
    """Yield the launch that reads shared prefixes: the products and pools of served models."""
    spec = AttentionShape(256, 32, 8, 128, 64, 16)
    yield _shared_case("8b", spec)
    for stored in (jnp.float8_e4m3fn, jnp.int8):
        yield _shared_case("8b", replace(spec, kv_dtype=stored), usual=False)
    yield _shared_case("8b", replace(spec, kv_dtype=jnp.int8, page=16), usual=False)
    yield _shared_case("70b-tp4", replace(spec, heads=16, kv_heads=2), usual=False)
    yield _shared_case("group 1", replace(spec, heads=32, kv_heads=32), usual=False)
    yield _shared_case("d64", replace(spec, heads=16, kv_heads=4, dim=64), usual=False)
    yield _shared_case("d256", replace(spec, heads=16, kv_heads=4, dim=256), usual=False)
    yield _shared_case("group 2 softcap", replace(spec, heads=16), usual=False, softcap=50.0)


def _shared_case(name: str, spec: AttentionShape, *, usual: bool = True, **options: Any) -> Case:
    config = decode.heuristic(spec)
    groups, rows = [((spec.rows // 4,), jnp.int32)] * 3, [((spec.rows,), jnp.int32)]
    q, *rest = _arguments(spec, spec.rows)
    return Case(
        name=f"shared prefixes {name} {_dtypes(spec)} page{spec.page}",
        program=partial(_shared_step, spec=spec, config=config, **options),
        arguments=(q, *rest[: 2 + ARRAYS], *shapes(*rows, *groups), *rest[2 + ARRAYS :]),
        needs=frozenset({"mma" if config.warps else "wgmma", "tma"}),
        usual=usual,
    )


def _shared_step(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    *rest: jax.Array,
    spec: AttentionShape,
    config: decode.Config,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Plan and read the shared pages, as one layer of a decode step does."""
    ends = ARRAYS + len(SharedPrefixes._fields)
    ragged = Ragged.of(rest[:ARRAYS])._replace(shared=SharedPrefixes(*rest[ARRAYS:ends]))
    groups, scales = cascade.plan(ragged, config, page=spec.page), Scales(*rest[ends:]) if spec.quantized else None
    return cascade.attend_shared(
        q, k_pool, v_pool, groups, scale=spec.dim**-0.5, scales=scales, config=config, **options
    )


def prefill_cases() -> Iterator[Case]:
    """Yield every prefill config in use."""
    for model, (heads, kv_heads, dim) in PREFILL_MODELS.items():
        spec = AttentionShape(64, heads, kv_heads, dim, 64)
        for page in (16, 64, 128):
            yield _prefill_case(model, replace(spec, page=page), 2048)
    spec = AttentionShape(64, 32, 8, 128, 64)
    for tokens in (512, 8192):
        yield _prefill_case("8b", spec, tokens)
    yield _prefill_case("8b", replace(spec, dtype=jnp.float16, kv_dtype=jnp.float16), 2048)
    for name, p_in_smem in (("shared", True), ("registers", False)):  # whichever form the compiler's version selects
        config = replace(prefill.heuristic(spec), p_in_smem=p_in_smem, ahead=not p_in_smem)  # both do not fit
        yield _prefill_case(f"8b {name}", spec, 2048, config)
    for name, p_in_smem in (("overlap", True), ("registers overlap", False)):
        config = replace(prefill.heuristic(spec), keys=64, stages=3, p_in_smem=p_in_smem, overlap=True)
        yield _prefill_case(f"8b {name}", spec, 2048, config)
    yield _prefill_case("d64", AttentionShape(64, 16, 8, 64, 64), 2048)
    wide = AttentionShape(64, 16, 8, 256, 64)  # Gemma 3 12B
    yield _prefill_case("d256", wide, 2048)
    yield _prefill_case("d256 window", wide, 2048, prefill.heuristic(wide, window=1024), window=1024)
    narrow = replace(wide, heads=4, kv_heads=1)  # Gemma 3 1B
    yield _prefill_case("d256 group 4 window", narrow, 8192, prefill.heuristic(narrow, window=512), window=512)
    for stored in (jnp.float8_e4m3fn, jnp.int8):
        yield _prefill_case("8b", replace(spec, kv_dtype=stored), 2048)
    yield _prefill_case("group 5", AttentionShape(64, 40, 8, 128, 64), 2048)
    windowed = AttentionShape(64, 16, 8, 128, 64)
    yield _prefill_case(
        "softcap window", windowed, 2048, prefill.heuristic(windowed, window=4096), window=4096, softcap=50.0
    )


def _prefill_case(
    name: str, spec: AttentionShape, tokens: int, config: prefill.Config | None = None, **options: Any
) -> Case:
    return Case(
        name=f"prefill {name} {_dtypes(spec)} page{spec.page} t{tokens}",
        program=partial(
            _step, attend=prefill.paged_prefill, spec=spec, config=config or prefill.heuristic(spec), **options
        ),
        arguments=_arguments(spec, tokens),
        needs=frozenset({"wgmma", "tma"}),
    )
