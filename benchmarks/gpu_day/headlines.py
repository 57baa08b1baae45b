"""The times that a first visit must bring back: every kernel of this repository in the case that matters most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.quantized import Quantized, einsum
from pallas_kernels.layout import Ragged, Scales
from pallas_kernels.mosaic.spec import CORES, AttentionShape
from pallas_kernels.ops.gated_matmul import hopper as gated
from pallas_kernels.ops.gated_matmul.api import GATES
from pallas_kernels.ops.grouped_matmul.hopper import matmul as grouped
from pallas_kernels.ops.grouped_matmul.plan import Groups
from pallas_kernels.ops.kv_write import hopper as kv_write
from pallas_kernels.ops.mla import hopper as mla
from pallas_kernels.ops.paged_attention.hopper import decode as decode_kernel
from pallas_kernels.ops.paged_attention.hopper import prefill as prefill_kernel
from pallas_kernels.ops.paged_attention.xla import paged_attention as by_xla
from pallas_kernels.ops.quantized_matmul import hopper as quantized
from pallas_kernels.ops.sampling_threshold import hopper as sampling
from pallas_kernels.ops.sampling_threshold.search import LOG2_E, Options

from .part import Run
from .shapes import Case, cases
from .timing import POOLS, Headline, Timing, interpreter_or_none, normal, reading

DECODES = ("decode B64 ctx4096", "decode B64 ctx4096 fp8", "decode B256 ctx2048", "decode B1 ctx131072")
FIRST = (*DECODES, "prefill 8192", "prefill 2048 after 14336", "decode B64 ctx4096 T4")
LATER = (
    "decode B64 ctx4096 page16", "decode B64 ctx4096 int8", "decode B64 ctx32768 H4K1", "decode B64 ctx32768 H4K1 fp8"
)  # fmt: skip
Z = 1.5  # exponent of the ranks of logits


def attention(run: Run) -> None:
    """Time decode and prefill."""
    Timing(run).all(attention_of(cases(run.dry)[name], run.dry) for name in FIRST)


def others(run: Run) -> None:
    """Time MLA, experts, the gated and the 8-bit product, KV writes and sampling."""
    Timing(run).all(_others(run.dry))


def more(run: Run) -> None:
    """Time what answers questions of design: pages, 8 bits, axis order, weights in registers, XLA's forms."""
    found = cases(run.dry)
    Timing(run).all(
        [
            *(attention_of(found[name], run.dry) for name in LATER),
            *(in_registers(found[name], run.dry) for name in ("prefill 8192", "decode B64 ctx4096")),
            xla_attention(found["decode B64 ctx4096"]),
            latents(found["latent B64 ctx4096 H16 fp8"], run.dry),
            gated_product(run.dry, "xla"),
            quantized_product(run.dry, "xla"),
            writes(run.dry, 8192, 4, "xla"),
        ]
    )


def _others(dry: bool) -> Iterator[Headline]:
    found = cases(dry)
    yield latents(found["latent B64 ctx4096 H16"], dry)
    yield latents(found["latent B64 ctx4096 H128"], dry)
    yield experts(dry)
    yield gated_product(dry, "mosaic")
    yield writes(dry, 256, 256, "mosaic")
    yield writes(dry, 8192, 4, "mosaic")
    yield thresholds(dry)
    yield quantized_product(dry, "mosaic")


def scales_of(case: Case) -> Scales | None:
    """Return scales of one for 8-bit pools, whose random values are about one; None for wider pools."""
    if jnp.dtype(case.kv_dtype).itemsize > 1:
        return None
    return Scales(jnp.ones(case.kv_heads), jnp.ones(case.kv_heads))


def shape_of(case: Case, dry: bool) -> AttentionShape:
    """Return what the kernels' heuristics look at; a dry run has two cores, to save interpreter time."""
    return AttentionShape(
        len(case.rows), case.heads, case.kv_heads, case.dim, case.page, case.queries, case.dtype, case.kv_dtype,
        2 if dry else CORES, case.values,
    )  # fmt: skip


def attention_of(case: Case, dry: bool, config: Any = None, label: str = "mosaic") -> Headline:
    """Return paged attention of a case with a config; None: the one that an engine chooses."""
    few = case.queries <= 16
    module: Any = decode_kernel if few else prefill_kernel
    kernel = decode_kernel.paged_decode if few else prefill_kernel.paged_prefill
    config = module.heuristic(shape_of(case, dry)) if config is None else config

    def call(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged, work: Any) -> Any:
        told = interpreter_or_none(dry)
        return kernel(q, k, v, ragged, work, scale=case.scale, scales=scales_of(case), config=config, interpret=told)

    def make() -> Any:
        ragged, pages = case.ragged()
        return case.queries_of(), case.all_pools(pages), (ragged, config.plan(ragged, page=case.page))

    return Headline(case.name, label, call, make, case.moved, case.flops, config=config)


def in_registers(case: Case, dry: bool) -> Headline:
    """Return the other place of the weights, which ptxas before 13.3 may miscompile when it is in registers."""
    plain = attention_of(case, dry)
    turned = not plain.config.p_in_smem
    warps = {"warps": False} if hasattr(plain.config, "warps") else {}
    config = replace(plain.config, p_in_smem=turned, **warps)
    return attention_of(case, dry, config, "mosaic " + ("P through smem" if turned else "P in registers"))


def xla_attention(case: Case) -> Headline:
    def call(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Ragged) -> jax.Array:
        few = case.queries == 1
        return by_xla(q, k, v, ragged, scale=case.scale, decode=few, queries=case.queries, scales=scales_of(case))

    def make() -> Any:
        ragged, pages = case.ragged()
        return case.queries_of(), case.all_pools(pages), (ragged,)

    return Headline(case.name, "xla", call, make, case.moved, case.flops)


def latents(case: Case, dry: bool) -> Headline:
    """Return MLA attention over one pool of latents."""
    config = mla.heuristic(shape_of(case, dry))

    def call(q: jax.Array, pool: jax.Array, work: Any) -> Any:
        told = interpreter_or_none(dry)
        return mla.paged_mla(q, pool, work, values=case.values, scale=case.scale, config=config, interpret=told)

    def make() -> Any:
        ragged, pages = case.ragged()
        return case.queries_of(), case.all_pools(pages), (config.plan(ragged, page=case.page, short=True),)

    return Headline(case.name, "mosaic", call, make, case.moved, case.flops, config=config)


def experts(dry: bool) -> Headline:
    """Return gate and up of a layer of Qwen3-30B-A3B: 64 tokens, routed to 8 uniformly drawn experts of 128 each."""
    tokens, count, chosen, width, outputs = (5, 3, 2, 64, 128) if dry else (64, 128, 8, 2048, 1536)
    draw = np.random.default_rng(0)
    routed = np.concatenate([draw.permutation(count)[:chosen] for _ in range(tokens)]).astype(np.int32)
    spec = grouped.GroupedSpec(len(routed), count, width, outputs, cores=2 if dry else grouped.CORES)
    config = grouped.heuristic(spec)

    def call(x: jax.Array, weight: jax.Array, work: Groups) -> jax.Array:
        return grouped.grouped_matmul(x, weight, work, config=config, interpret=interpreter_or_none(dry))

    def make() -> Any:
        work = grouped.plan(jnp.asarray(routed), count)
        x, weight = normal((len(routed), width), jnp.bfloat16, 1), normal((count, width, outputs), jnp.bfloat16, 2)
        return x[work.source], [(weight * jnp.bfloat16(width**-0.5),)], (work,)

    moved = 2.0 * (len(np.unique(routed)) * width * outputs + len(routed) * (width + outputs))
    return Headline(
        "experts 64 tokens", "mosaic", call, make, moved, 2.0 * len(routed) * width * outputs, config=config
    )


def gated_product(dry: bool, kernel: str) -> Headline:
    """Return gate, up and SwiGLU of a layer of Llama-3-8B at 64 tokens; XLA's form has a second launch."""
    tokens, inputs, results = (8, 128, 128) if dry else (64, 4096, 14336)
    config = gated.heuristic(gated.spec_of(tokens, inputs, 2 * results, cores=2 if dry else CORES))
    gate = GATES["silu"]

    def call(x: jax.Array, weight: jax.Array) -> jax.Array:
        if kernel == "mosaic":
            told = interpreter_or_none(dry)
            return gated.gated_matmul(x, weight.reshape(inputs, -1), gate=gate, config=config, interpret=told)
        both = jnp.einsum("te,epf->tpf", x, weight)
        return gate(both[:, 0], both[:, 1])

    def make() -> Any:
        shape, size = (inputs, 2, results), jnp.bfloat16(inputs**-0.5)
        weights = [(normal(shape, jnp.bfloat16, i) * size,) for i in range(2 if dry else POOLS)]
        return normal((tokens, inputs), jnp.bfloat16, 99), weights, ()

    moved, flops = 2.0 * (2 * inputs * results + tokens * (inputs + results)), 4.0 * tokens * inputs * results
    return Headline("gated 64 tokens", kernel, call, make, moved, flops)


def quantized_product(dry: bool, kernel: str) -> Headline:
    """Return gate and up of Llama-3-8B in fp8 with a scale for each block of 128 inputs, at 64 tokens."""
    tokens, inputs, outputs = (4, 256, 256) if dry else (64, 4096, 28672)
    stored, dtype = (jnp.int8, jnp.float16) if dry else (jnp.float8_e4m3fn, jnp.bfloat16)
    spec = quantized.QuantizedSpec(tokens, inputs, outputs, inputs // 128, dtype, stored, 2 if dry else CORES)
    config = quantized.heuristic(spec)

    def call(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        if kernel == "mosaic":
            return quantized.quantized_matmul(x, values, scale, config=config, interpret=interpreter_or_none(dry))
        return einsum("ti,io->to", x, Quantized(values, scale, 0))

    def make() -> Any:
        scale = jnp.full((spec.scales, outputs), 0.01, jnp.float32)
        weights = [(normal((inputs, outputs), stored, i), scale) for i in range(2 if dry else POOLS)]
        return normal((tokens, inputs), dtype, 99), weights, ()

    moved, flops = inputs * outputs + 2.0 * tokens * (inputs + outputs), 2.0 * tokens * inputs * outputs
    return Headline("fp8 product 64 tokens", kernel, call, make, moved, flops)


def writes(dry: bool, tokens: int, rows: int, kernel: str) -> Headline:
    """Return RoPE and the KV write of a step of `tokens` new tokens in `rows` rows."""
    from tests.support.kernels.checks.kv_write import rope_and_write_xla

    name = f"kv write {tokens}"
    each = 1 if dry else tokens // rows
    case = Case(name, ((each, max(each, 512)),) * rows)
    if dry:
        case = Case(name, ((each, 20),) * 3, 16, 4, 2, 64, jnp.float16, pools=2)

    # The heads are part of the donated state, and one element of them changes: an addition would copy them.
    def call(state: Any, turn: Any, ragged: Ragged) -> Any:
        heads, k_pool, v_pool = state
        if kernel == "mosaic":
            found = kv_write.rope_and_write(*heads, turn, k_pool, v_pool, ragged, interpret=interpreter_or_none(dry))
        else:
            found = rope_and_write_xla(*heads, turn, k_pool, v_pool, ragged)
        first = heads[0].at[(0,) * heads[0].ndim].add(found[0][0, 0, 0] * 0)
        return (first, *heads[1:]), *found[1:]

    def make() -> Any:
        ragged, pages = case.ragged()
        angle = normal((case.tokens, 1, case.dim // 2), jnp.float32, 5)

        def heads(seed: int) -> Any:
            each = (case.heads, case.kv_heads, case.kv_heads)
            given = [normal((case.tokens, count, case.dim), case.dtype, 3 * seed + at) for at, count in enumerate(each)]
            return (kv_write.packed(*given),) if kernel == "mosaic" else tuple(given)

        state = [(heads(i), *case.pool(pages, i)) for i in range(case.pools)]
        return state, ((jnp.cos(angle), jnp.sin(angle)), ragged)

    sides = case.tokens * (2 * case.kv_heads + case.heads) * case.dim * 2
    return Headline(name, kernel, call, make, 2.0 * sides + 4.0 * case.tokens * case.dim, in_place=True)


def thresholds(dry: bool) -> Headline:
    """Return the search for the thresholds of top-k 50 and top-p 0.9, with the logits of a language model's shape.

    The bytes are those of one look at the logits.
    """
    rows, vocab = (2, 512) if dry else (256, 128256)
    config = sampling.heuristic(vocab)

    def call(x: jax.Array, options: Options) -> jax.Array:
        return sampling.thresholds(x, options, config=config, interpret=interpreter_or_none(dry)).threshold

    def make() -> Any:
        rank = jnp.argsort(jnp.argsort(-jax.random.uniform(jax.random.key(8), (rows, vocab))))
        x = -Z * jnp.log1p(rank.astype(jnp.float32)) + 0.3 * normal((rows, vocab), jnp.float32, 7)
        options = Options(*(jnp.full(rows, value, jnp.float32) for value in (LOG2_E, -jnp.inf, 50.0, 0.9)))
        return x, [(options,)], ()

    return Headline(f"sampling {rows}x{vocab}", "mosaic", call, make, 4.0 * rows * vocab)


def slopes(run: Run) -> None:
    """Fit the two slopes of decode: t = c + alpha * (longest context) + beta * (sum of the other contexts).

    alpha and beta are in seconds per token of context, for one layer on one device. An alpha well above beta means that
    the kernel leaves the longest row to few workers.
    """
    time = Timing(run, samples=10)
    rows = 3 if time.dry else 64
    longest, rest = ((20, 40, 60), (10, 20)) if time.dry else ((4096, 16384, 65536, 131072), (512, 2048, 4096))
    case = Case("slopes", ((1, longest[-1]), *((1, rest[-1]),) * (rows - 1)))
    if time.dry:
        case = replace(case, page=16, heads=4, kv_heads=2, dim=64, dtype=jnp.float16, pools=2)
    # A dry run tests only the fit, for which an interpreted kernel would be needlessly slow.
    one = xla_attention(case) if time.dry else attention_of(case, dry=False)
    turns = time.turns((time.floor(case.moved) or 4e-3) / 4)
    loop, (q, pools, (ragged, *_)) = reading(one.call, turns), jax.jit(one.make)()
    plan = jax.jit(lambda step: () if time.dry else (one.config.plan(step, page=case.page),))
    points = []
    for mine in longest:
        for other in rest:
            contexts = np.array([mine, *[other] * (rows - 1)], np.int32)
            # Contexts change but shapes do not, so one program serves all points.
            step = ragged._replace(contexts=jnp.asarray(contexts), positions=jnp.asarray(contexts - 1))
            args = q, pools, (step, *plan(step))
            found = time.seconds(lambda args=args: loop(*args), turns * case.pools)
            here = replace(case, name=f"slopes {mine}+{rows - 1}x{other}", rows=tuple((1, int(c)) for c in contexts))
            time.add(here.name, one.kernel, found, moved=here.moved, flops=here.flops)
            points.append((mine, (rows - 1) * other, min(found)))
    table = np.array(points)
    columns = np.stack([np.ones(len(table)), table[:, 0], table[:, 1]], axis=1)
    fit, *_ = np.linalg.lstsq(columns, table[:, 2], rcond=None)
    run.row(
        "slopes", of=f"one layer, {rows} rows, least squares of {len(points)} points", constant_us=1e6 * fit[0],
        alpha_ns_per_token=1e9 * fit[1], beta_ns_per_token=1e9 * fit[2],
        worst_residual_us=1e6 * float(np.abs(columns @ fit - table[:, 2]).max()),
    )  # fmt: skip
