"""Every kernel as compiled for a Hopper GPU, against float64: families of cases, which `benchmarks.gpu_day` runs.

Cases of attention have NaN in every page that no row has. The first case of each family is small
enough for the interpreter, as are most others; "served" ones have the shapes of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ptxas
from pallas_kernels.mosaic import compat
from pallas_kernels.ops.grouped_matmul.hopper import matmul
from pallas_kernels.ops.mla import hopper as latent
from pallas_kernels.ops.paged_attention.hopper import decode as decode_kernel
from pallas_kernels.ops.paged_attention.hopper import prefill as prefill_kernel
from pallas_kernels.ops.quantized_matmul import hopper as narrow
from pallas_kernels.ops.quantized_matmul.hopper import QuantizedSpec
from pallas_kernels.ops.sampling_threshold import hopper as borders
from tests.support.kernels.checks import (
    cascade,
    decode,
    foreign,
    gated_matmul,
    grouped_matmul,
    kv_pages,
    kv_write,
    mla,
    prefill,
    quantized_matmul,
    sampling,
)
from tests.support.kernels.interpreted import cores, on_gpu

pytestmark = pytest.mark.gpu
Cases = Mapping[str, Callable[[], Any]]
DIMS, PAGES = (64, 128, 256), (16, 64)
BYTES = (jnp.float8_e4m3fn, jnp.int8)
ONES = tuple((1, 1 + 397 * row % 2000) for row in range(48))  # decode rows of a batch
DRAFTS = ((4, 20), (1, 17), (3, 140), (2, 66))  # tokens to verify
CHUNKS = ((400, 400), (130, 1000), (17, 2000), (5, 70), (1, 300))  # prompts and chunks of prompts, and a decode row


def name_of(dtype: Any) -> str:
    return jnp.dtype(dtype).name


def in_registers(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check of weights in registers, which skips if the compiler may get them wrong."""

    def run() -> None:
        release = ptxas.release(ptxas.found()) if on_gpu() else ""
        if on_gpu() and not ptxas.trusted(release):
            pytest.skip(f"ptxas {release or 'of unknown release'} may miscompile weights in registers; 13.3 does not")
        check()

    return run


def by_warps(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check of products of single warps, which skips if this jax has none of 16 bits."""

    def run() -> None:
        if not compat.HAS_MMA:
            pytest.skip(f"16-bit products of single warps need jax 0.11; this is {jax.__version__}")
        check()

    return run


def decoded(rows: Any, queries: int = 1, warps: bool | None = None, **problem: Any) -> Callable[[], None]:
    """Return a check with the config that an engine chooses; `warps` as in `heuristic`."""
    made = decode.Problem(**{"rows": rows, "heads": 8, "kv_heads": 2, "padded": 2, "pool": 40, **problem})
    return partial(decode.check, made, decode_kernel.heuristic(made.shape(queries), warps=warps))


DECODE: Cases = {
    "one row": partial(decode.check, decode.Problem(((1, 70),)), decode.SMALL),
    **{f"dim {dim}, page {page}": decoded(decode.EDGES, dim=dim, page=page) for dim in DIMS for page in PAGES},
    "by warpgroups": decoded(decode.EDGES, warps=False),
    "weights in registers": in_registers(
        partial(decode.check, decode.Problem(decode.EDGES), replace(decode.SMALL, p_in_smem=False))
    ),
    "drafts": decoded(DRAFTS, 4),
    "drafts by warpgroups": decoded(DRAFTS, 4, False),
    "up to 16 tokens": decoded(((16, 80), (17, 40), (1, 5)), 16),
    "16 query heads each": decoded(decode.EDGES, heads=32, dim=128),
    "one kv head, dim 256": decoded(decode.EDGES, heads=4, kv_heads=1, dim=256),
    "a window": decoded(DRAFTS, 4, window=30),
    "a window of one key": decoded(decode.EDGES, window=1),
    "a soft cap": decoded(DRAFTS, 4, softcap=3.0),
    "a window and a soft cap, dim 256": decoded(DRAFTS, 4, window=30, softcap=5.0, dim=256),
    "sinks and a window": decoded(DRAFTS, 4, sinks=True, window=30),
    "float16": decoded(DRAFTS, 4, dtype=jnp.float16),
    "shared pages": decoded(((1, 70), (1, 90), (1, 128)), tables=((5, 9), (5, 3), (5, 9))),
    "served": decoded(ONES, heads=32, kv_heads=8, dim=128, pool=900),
    "served in a mixed step": decoded(ONES, 16, heads=32, kv_heads=8, dim=128, pool=900),
    "foreign values": by_warps(partial(foreign.decode, foreign.WARPS)),
    "foreign values by warpgroups": partial(foreign.decode, replace(foreign.WARPS, warps=False, consumers=2)),
}
DECODE_8BIT: Cases = {
    "one row": partial(decode.check, decode.Problem(((1, 70),), stored=jnp.int8), decode.SMALL),
    **{
        f"{name_of(stored)}, dim {dim}, page {page}": decoded(decode.EDGES, dim=dim, page=page, stored=stored)
        for dim, page, stored in ((64, 16, BYTES[0]), (64, 64, BYTES[1]), (128, 16, BYTES[1]), (128, 64, BYTES[0]),
                                  (256, 16, BYTES[0]), (256, 64, BYTES[1]))
    },
    **{f"{name_of(stored)}, drafts": decoded(DRAFTS, 4, dim=128, stored=stored) for stored in BYTES},
    "by warpgroups": decoded(DRAFTS, 4, False, stored=BYTES[0]),
    "a window and a soft cap": decoded(DRAFTS, 4, window=30, softcap=5.0, stored=BYTES[1]),
    "sinks": decoded(decode.EDGES, sinks=True, stored=BYTES[0]),
    "float16": decoded(decode.EDGES, dtype=jnp.float16, stored=BYTES[0]),
    **{
        f"served {name_of(stored)}": decoded(ONES, heads=32, kv_heads=8, dim=128, pool=900, stored=stored)
        for stored in BYTES
    },
    **{f"foreign {name_of(stored)}": partial(foreign.decode, foreign.WARPS, stored) for stored in BYTES},
}  # fmt: skip


def chunked(rows: Any = prefill.MIXED, **problem: Any) -> Callable[[], None]:
    """Return a check with the config that an engine chooses."""
    made = prefill.Problem(**{"rows": rows, "heads": 8, "kv_heads": 2, "padded": 3, **problem})
    return partial(prefill.check, made, prefill_kernel.heuristic(made.shape(), window=made.window))


def of_cases(*names: str) -> Cases:
    return {name: partial(prefill.check, *prefill.CASES[name]) for name in names}


PREFILL: Cases = {
    **of_cases("fewer tokens than a tile"),
    **{f"dim {dim}, page {page}": chunked(dim=dim, page=page) for dim in DIMS for page in PAGES},
    "one query head each": chunked(heads=2),
    "8 query heads each": chunked(heads=16, dim=128),
    "a window": chunked(window=33),
    "a soft cap": chunked(softcap=3.0),
    "a window and a soft cap, dim 256": chunked(window=33, softcap=5.0, dim=256),
    "sinks and a window": chunked(sinks=True, window=33),
    "a window wider than any context": chunked(window=1000),
    **of_cases(
        "one head of a group of three", "no turns", "overlap", "float16", "a page of two tiles",
        "around the edges of pages and tiles", "shared pages", "nothing but decode rows",
    ),
    "weights in registers": in_registers(partial(prefill.check, *prefill.CASES["weights in registers"])),
    "served": chunked(CHUNKS, heads=16, kv_heads=4, dim=128, page=64, pool=80),
    "foreign values": foreign.prefill,
}  # fmt: skip
PREFILL_8BIT: Cases = {
    **of_cases("int8, one stage"),
    **{
        f"{name_of(stored)}, dim {dim}, page {page}": chunked(dim=dim, page=page, stored=stored)
        for dim in DIMS[:2]
        for page in PAGES
        for stored in BYTES
    },
    **of_cases(
        "float8 beside float16", "int8, a page of two tiles", "int8, a window, a soft cap and padding",
        "int8, each block one item",
    ),
    "sinks": chunked(sinks=True, stored=BYTES[0]),
    **{
        f"served {name_of(stored)}": chunked(CHUNKS, heads=16, kv_heads=4, dim=128, page=64, pool=80, stored=stored)
        for stored in BYTES
    },
    **{f"foreign {name_of(stored)}": partial(foreign.prefill, stored) for stored in BYTES},
}  # fmt: skip


def sharing(rows: Any = cascade.CHUNKS, prefixes: Any = cascade.PREFIXES, **problem: Any) -> Callable[[], None]:
    """Return a check of a layer with the config that an engine chooses."""
    return partial(cascade.check, cascade.Problem(prefixes, rows, **problem))


SERVED = tuple((1 + row % 3 // 2, 1, 1600 + 37 * row) for row in range(48))
SHARED_PREFIXES: Cases = {
    "decodes": sharing(cascade.DECODES, decode=True),
    "drafts": sharing(cascade.DRAFTS, few=True),
    **{f"prompts, dim {dim}": sharing(dim=dim, heads=8) for dim in DIMS},
    "one query head each": sharing(heads=2),
    "a window, a soft cap and sinks": sharing(window=75, softcap=3.0, sinks=True),
    **{f"{name_of(stored)}, dim {dim}": sharing(dim=dim, stored=stored) for stored in BYTES for dim in DIMS},
    "served": sharing(SERVED, (24, 16), heads=32, kv_heads=8, dim=128, page=64, pool=2000, decode=True),
}


def of_latents(
    rows: Any = mla.EDGES, queries: int = 1, warps: bool | None = None, **problem: Any
) -> Callable[[], None]:
    """Return a check with the config that an engine chooses; `warps` as in `heuristic`."""
    made = mla.Problem(**{"rows": rows, "heads": 16, "values": 512, "padded": 1, "pool": 40, **problem})
    return partial(mla.check, made, latent.heuristic(made.shape(queries), warps=warps))


PROMPTS = ((1, 150), (19, 150), (3, 66))
MLA: Cases = {
    "one row": partial(mla.check, mla.Problem(((1, 70),)), mla.SMALL),
    **{f"16 heads, page {page}": of_latents(page=page) for page in PAGES},
    "16 heads by warpgroups": of_latents(warps=False),
    "prompts": of_latents(PROMPTS, 64),
    "128 heads": of_latents(heads=128),
    "a window and a soft cap": of_latents(PROMPTS, 64, window=30, softcap=5.0),
    "float16, a rank of 128": of_latents(dtype=jnp.float16, values=128),
    **{f"{name_of(stored)}, page {page}": of_latents(page=page, stored=stored) for stored in BYTES for page in PAGES},
    "prompts of 8 bits": of_latents(PROMPTS, 64, stored=BYTES[0]),
    "served": of_latents(ONES, page=64, pool=900),
    "foreign values": by_warps(partial(foreign.mla, replace(foreign.LATENT, warps=True, tile=32))),
    "foreign values of 8 bits": partial(foreign.mla, replace(foreign.LATENT, warps=True), BYTES[0]),
}


def routed(pairs: int, stored: Any = None, scales: int = 1) -> Callable[[], None]:
    """Return a check of 16 experts at the sizes of a model, with the config that an engine chooses."""
    experts, width, outputs = 16, 1024, 768
    chosen = np.random.default_rng(pairs).integers(0, experts, pairs).tolist()
    spec = matmul.GroupedSpec(pairs, experts, width, outputs, stored=stored, scales=scales)
    options = {"size": (experts, width, outputs)}
    if stored is None:
        return partial(grouped_matmul.check, matmul.heuristic(spec), chosen, jnp.bfloat16, jnp.bfloat16, **options)
    return partial(
        grouped_matmul.check_narrow, matmul.heuristic(spec), chosen, stored, scales, jnp.bfloat16, jnp.bfloat16,
        **options,
    )  # fmt: skip


GROUPED_MATMUL: Cases = {
    **{
        f"{form}, {route}": partial(
            grouped_matmul.check, grouped_matmul.CONFIGS[form], grouped_matmul.ROUTES[route], jnp.bfloat16, out
        )
        for form, route, out in (
            ("swapped", "elsewhere", jnp.float32), ("swapped 32", "a tile and one more", jnp.bfloat16),
            ("swapped narrow", "none to the middle", jnp.bfloat16), ("straight", "all to one", jnp.float32),
            ("straight narrow", "all elsewhere", jnp.bfloat16),
        )
    },
    **{
        f"{form} of {name_of(stored)}, {route}": partial(
            grouped_matmul.check_narrow, grouped_matmul.NARROW[form], grouped_matmul.ROUTES[route], stored, scales,
            jnp.bfloat16, jnp.float32,
        )
        for form in grouped_matmul.NARROW
        for route, stored, scales in (("elsewhere", BYTES[1], 2), ("a tile and one more", BYTES[0], 1))
    },
    **{f"served {pairs}": routed(pairs) for pairs in (1, 64, 512, 4096)},
    **{
        f"served {pairs} {name_of(stored)}": routed(pairs, stored, scales)
        for pairs in (64, 512)
        for stored, scales in ((BYTES[0], 8), (BYTES[1], 1))
    },
}  # fmt: skip


def product(tokens: int, inputs: int, outputs: int, scales: int, stored: Any, dtype: Any = jnp.bfloat16) -> Any:
    """Return a check with the config that an engine chooses."""
    spec = QuantizedSpec(tokens, inputs, outputs, scales, dtype, stored, cores())
    return partial(quantized_matmul.check, spec, narrow.heuristic(spec))


QUANTIZED_MATMUL: Cases = {
    "strips that several blocks share": partial(
        quantized_matmul.check, QuantizedSpec(5, 256, 384, 2), quantized_matmul.SMALL
    ),
    **{
        f"{tokens} tokens of {name_of(stored)}": product(tokens, 512, 384, 4, stored)
        for tokens in (1, 8, 33, 130, 256)
        for stored in BYTES
    },
    "float16": product(9, 256, 256, 1, BYTES[0], jnp.float16),
    "served": product(64, 4096, 6144, 32, BYTES[0]),
}


GATED_MATMUL: Cases = {
    "one tile": partial(gated_matmul.check, 8, 128, 128),
    **{f"{tokens} tokens": partial(gated_matmul.check, tokens, 512, 384) for tokens in (20, 33, 130, 256)},
    "GELU": partial(gated_matmul.check, 64, 256, 256, "gelu_pytorch_tanh"),
    "float16": partial(gated_matmul.check, 40, 256, 256, dtype=jnp.float16),
    **{f"served {tokens}": partial(gated_matmul.check, tokens, 4096, 14336) for tokens in (8, 64, 256, 2048)},
}
KV_WRITE: Cases = {
    f"{shape} of {name_of(dtype)} as {name_of(stored or dtype)}{'' if turned else ' unturned'}": partial(
        lambda *given, turned: kv_write.check(kv_write.step(*given), turned=turned), *shape, dtype, stored,
        turned=turned,
    )
    for shape in kv_write.SHAPES
    for dtype, stored, turned in (
        (jnp.bfloat16, None, True), (jnp.float16, None, False), (jnp.bfloat16, BYTES[0], True),
        (jnp.bfloat16, BYTES[1], True),
    )
}  # fmt: skip
KV_PAGES: Cases = {
    f"{shape} of {name_of(dtype)}": partial(kv_pages.check, dtype, shape)
    for shape in (kv_pages.SHAPE, (40, 16, 8, 128), (40, 64, 1, 576))
    for dtype in kv_pages.DTYPES
}
SAMPLING: Cases = {
    **{
        f"{kind}, {vocab}": lambda kind=kind, vocab=vocab: sampling.check_kernel(
            sampling.rows(kind, vocab, len(sampling.CUTS)), sampling.CUTS, borders.heuristic(vocab)
        )
        for vocab in (1004, 32000)
        for kind in sampling.KINDS
    },
    "served 128256": lambda: sampling.check_kernel(
        sampling.rows("peaked", 128256, 36), 3 * sampling.CUTS, borders.heuristic(128256)
    ),
}


FAMILIES: Mapping[str, Cases] = {
    "decode": DECODE,
    "prefill": PREFILL,
    "decode_8bit": DECODE_8BIT,
    "prefill_8bit": PREFILL_8BIT,
    "shared_prefixes": SHARED_PREFIXES,
    "mla": MLA,
    "grouped_matmul": GROUPED_MATMUL,
    "quantized_matmul": QUANTIZED_MATMUL,
    "gated_matmul": GATED_MATMUL,
    "kv_write": KV_WRITE,
    "kv_pages": KV_PAGES,
    "sampling": SAMPLING,
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, cases in FAMILIES.items() for name in cases])
def test_a_kernel_equals_float64(family: str, name: str) -> None:
    FAMILIES[family][name]()
