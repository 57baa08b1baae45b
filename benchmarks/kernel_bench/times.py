"""Time the kernels: decode and prefill attention, KV writes, page export and import, and the slopes of decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import Ragged
from pallas_kernels.ops.kv_write.xla import rope_and_write_xla

from . import ours, peers
from .cases import Case, decode_cases, prefill_cases
from .ours import Kernel
from .session import InPlace, Session, normal, reading, writing


def attend(session: Session, case: Case, kernel: Kernel, *, samples: int | None = None) -> list[float]:
    """Return the seconds of one call, without its plan."""
    ragged, pages = case.ragged()
    work = jax.jit(kernel.plan)(ragged)
    # The XLA path is tens of times slower: one turn is enough.
    turns = 1 if kernel.label == "xla" else session.turns(peers.least(session, case))
    args = case.queries_of(), case.all_pools(pages), (ragged, work)
    found: list[float] = session.seconds(reading(kernel.call, turns), args, turns * case.pools, samples)
    return found


def measure(session: Session, case: Case, kernels: Iterable[Kernel]) -> None:
    for kernel in kernels:
        found = session.part(f"{case.name}: {kernel.label}", lambda kernel=kernel: attend(session, case, kernel))
        if found is not None:
            session.add(case.name, kernel.label, found, moved=case.moved, flops=case.flops, config=str(kernel.config))


def plan(session: Session, case: Case, kernel: Kernel) -> None:
    """Time a kernel's plan, which is computed once per step."""
    ragged, _ = case.ragged()
    count = 1 if session.dry else 200

    @jax.jit
    def loop(ragged: Ragged) -> Any:
        def body(_: Any, contexts: jax.Array) -> jax.Array:
            work = kernel.plan(ragged._replace(contexts=contexts))
            return contexts + 0 * jnp.stack([leaf.ravel()[0] for leaf in jax.tree.leaves(work)]).sum()

        return jax.lax.fori_loop(0, count, body, ragged.contexts)

    session.add(case.name, f"plan of {kernel.label}", session.seconds(loop, (ragged,), count), moved=0.0)


def attention(session: Session) -> None:
    """Time the kernels in every case, and one plan of each kind."""
    for decode, cases in ((True, decode_cases(session.dry)), (False, prefill_cases(session.dry))):
        kernels = ours.decode_kernels if decode else ours.prefill_kernels
        for index, case in enumerate(cases):
            found = session.part(case.name, lambda case=case, kernels=kernels: list(kernels(case, dry=session.dry)))
            measure(session, case, found or ())
            if index == 0 and found:
                session.part(f"{case.name}: plan", lambda case=case, found=found: plan(session, case, found[0]))


def others(session: Session, reserve: float) -> None:
    """Time the XLA path, and the peers on cases with equal rows and an unquantized pool."""
    for decode, cases in ((True, decode_cases(session.dry)), (False, prefill_cases(session.dry))):
        for index, case in enumerate(cases):
            if index < 2:
                measure(session, case, [ours.xla(case)])
            if len(set(case.rows)) == 1 and jnp.dtype(case.kv_dtype).itemsize > 1:
                peers.measure(session, case, decode=decode, reserve=reserve)


def kv_write(session: Session, tokens: int, rows: int) -> None:
    """Time RoPE and the KV write of a step of `tokens` new tokens in `rows` rows."""
    each = tokens // rows
    case = Case(f"kv write {tokens}", ((each, max(each, 512)),) * rows)
    if session.dry:
        case = Case(f"kv write {tokens}", ((each, max(each, 20)),) * rows, 16, 4, 2, 64, jnp.float16, pools=2)
    ragged, pages = case.ragged()
    angle = normal((case.tokens, 1, case.dim // 2), jnp.float32, 5)
    turn = jnp.cos(angle), jnp.sin(angle)
    new = [normal((case.tokens, case.kv_heads, case.dim), case.dtype, i) for i in (6, 7)]
    q = case.queries_of()
    kv = 2 * tokens * case.kv_heads * case.dim * 2
    moved = 2 * kv + 2 * q.size * 2 + 4 * angle.size * 2.0

    def run(label: str, write: Any) -> None:
        turns = session.turns(moved / session.ceilings.copy)

        def call(state: Any, q: Any, k: Any, v: Any, turn: Any, ragged: Any) -> Any:
            held, k_pool, v_pool = state
            q, k_pool, v_pool = write(q + held[0, 0, 0], k, v, turn, k_pool, v_pool, ragged)
            return held.at[0, 0, 0].set(q[0, 0, 0] * 0), k_pool, v_pool

        state = [(jnp.zeros((1, 1, 1), case.dtype), *case.pool(pages, i)) for i in range(case.pools)]
        loop = InPlace(writing(call, turns), state)
        found = session.seconds(loop, (q, *new, turn, ragged), turns * case.pools)
        session.add(case.name, label, found, moved=moved)

    session.part(f"{case.name}: xla", lambda: run("xla", rope_and_write_xla))
    session.part(f"{case.name}: mosaic", lambda: run("mosaic", _write(session, case)))


def _write(session: Session, case: Case) -> Any:
    from pallas_kernels.mosaic import compat
    from pallas_kernels.mosaic.interpret import interpreter
    from pallas_kernels.ops.kv_write import hopper as module

    if session.dry and not compat.DETECTS_RACES:
        raise NotImplementedError(f"a dry run needs the interpreter of jax 0.11; this is {jax.__version__}")
    interpret = interpreter() if session.dry else None

    def write(q: Any, k: Any, v: Any, turn: Any, k_pool: Any, v_pool: Any, ragged: Any) -> Any:
        return module.rope_and_write(q, k, v, turn, k_pool, v_pool, ragged, interpret=interpret)

    return write


def pages_out_and_in(session: Session) -> None:
    """Time the export of 4096 tokens of 32 layers into a contiguous KV buffer, and the import from it."""
    from pallas_kernels.ops.kv_pages.api import export_pages, import_pages

    layers, count, page, kv_heads, dim = (2, 2, 16, 2, 64) if session.dry else (32, 64, 64, 8, 128)
    shape = 8 * count, page, kv_heads, dim
    pools = [tuple(normal(shape, jnp.bfloat16, 2 * i + part) for part in (0, 1)) for i in range(layers)]
    moved = 2.0 * 2 * layers * count * page * kv_heads * dim * 2
    draw = np.random.default_rng(0).permutation(8 * count)[: 4 * count].reshape(4, count).astype(np.int32)
    pages = [jnp.asarray(one) for one in draw]
    turns = session.turns(moved / session.ceilings.copy)

    @jax.jit
    def out(pages: list[jax.Array]) -> jax.Array:
        def body(_: Any, first: jax.Array) -> jax.Array:
            for one in pages:
                kv_buffer = jax.lax.optimization_barrier(export_pages(pools, one + first))
                first = first + (kv_buffer.ravel()[0] * 0).astype(jnp.int32)
            return first

        return jax.lax.fori_loop(0, turns, body, jnp.int32(0))

    session.add("pages 4096 x 32", "export", session.seconds(out, (pages,), 4 * turns), moved=moved)
    kv_buffer = export_pages(pools, pages[0])

    def call(pools: Any, pages: jax.Array, kv_buffer: jax.Array) -> Any:
        return import_pages(pools, pages, kv_buffer)

    loop = InPlace(writing(call, 4 * turns), [pools])
    session.add("pages 4096 x 32", "import", session.seconds(loop, (pages[1], kv_buffer), 4 * turns), moved=moved)


def slopes(session: Session) -> None:
    """Fit the two slopes of decode: t = c + alpha * (longest context) + beta * (sum of the other contexts).

    alpha and beta are in seconds per token of context, for one layer on one device. An alpha well above beta means that
    the kernel leaves the longest row to few workers.
    """
    rows = 3 if session.dry else 64
    longest = (20, 40, 60) if session.dry else (4096, 16384, 65536, 131072)
    others = (10, 20) if session.dry else (512, 2048, 4096)
    base: dict[str, Any] = {}
    if session.dry:
        base = {"page": 16, "heads": 4, "kv_heads": 2, "dim": 64, "dtype": jnp.float16, "pools": 2}
    case = Case("slopes", ((1, longest[-1]), *((1, others[-1]),) * (rows - 1)), **base)
    # A dry run tests only the fit, for which an interpreted kernel would be needlessly slow.
    kernel = ours.xla(case) if session.dry else next(iter(ours.decode_kernels(case, dry=False)))
    ragged, pages = case.ragged()
    turns = session.turns(peers.least(session, case) / 4)
    loop, make = reading(kernel.call, turns), jax.jit(kernel.plan)
    q, pools = case.queries_of(), case.all_pools(pages)
    points = []
    for one in longest:
        for other in others:
            mine = np.array([one, *[other] * (rows - 1)], np.int32)
            # Contexts change but shapes do not, so one program serves all points.
            step = ragged._replace(contexts=jnp.asarray(mine), positions=jnp.asarray(mine - 1))
            found = session.seconds(loop, (q, pools, (step, make(step))), turns * case.pools, samples=10)
            here = Case(f"slopes {one}+{rows - 1}x{other}", tuple((1, int(c)) for c in mine), **base)
            session.add(here.name, kernel.label, found, moved=here.moved, flops=here.flops)
            points.append((one, (rows - 1) * other, min(found)))
    table = np.array(points)
    columns = np.stack([np.ones(len(table)), table[:, 0], table[:, 1]], axis=1)
    fit, *_ = np.linalg.lstsq(columns, table[:, 2], rcond=None)
    session.facts["slopes"] = {
        "constant_s": fit[0],
        "alpha_s_per_token": fit[1],
        "beta_s_per_token": fit[2],
        "of": f"one layer, {rows} rows, H{case.heads} K{case.kv_heads} D{case.dim}, least squares",
        "worst_residual_s": float(np.abs(columns @ fit - table[:, 2]).max()),
        "points": points,
    }
