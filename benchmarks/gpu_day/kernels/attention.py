"""Time paged attention: decode and prefill, plans, and the two slopes of decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_day.part import Run
from pallas_kernels.layout import Ragged

from . import ours
from .cases import Case, decode_cases, named, prefill_cases
from .ours import Kernel
from .timing import Timing, reading


def decode(run: Run, cases: list[str], xla: bool = False, registers: bool = False) -> None:
    """Time the kernels of decode in the cases of these names, and one plan."""
    _measure(run, named(decode_cases(run.dry), cases), ours.decode_kernels, xla, registers)


def prefill(run: Run, cases: list[str], xla: bool = False, registers: bool = False) -> None:
    """Time the kernels of prefill in the cases of these names, and one plan."""
    _measure(run, named(prefill_cases(run.dry), cases), ours.prefill_kernels, xla, registers)


def _measure(run: Run, cases: Iterable[Case], kernels: Any, xla: bool, registers: bool) -> None:
    time = Timing(run)
    with time.each() as attempt:
        for case in cases:
            found = attempt(case.name, lambda case=case: list(kernels(case, dry=run.dry))) or []
            others = [ours.registers(kernel, case, dry=run.dry) for kernel in found if registers]
            timed = [*([ours.xla(case)] if xla else []), *(other for other in others if other)]
            for kernel in timed if registers else [*found, *timed]:
                attempt(f"{case.name}: {kernel.label}", lambda case=case, kernel=kernel: _row(time, case, kernel))
            if found and xla:
                attempt(f"{case.name}: plan", lambda case=case, kernel=found[0]: plan(time, case, kernel))


def _row(time: Timing, case: Case, kernel: Kernel) -> None:
    found = attend(time, case, kernel)
    time.add(case.name, kernel.label, found, moved=case.moved, flops=case.flops, config=str(kernel.config or ""))


def attend(time: Timing, case: Case, kernel: Kernel, *, samples: int | None = None) -> list[float]:
    """Return the seconds of one call, without its plan."""
    ragged, pages = case.ragged()
    work = jax.jit(kernel.plan)(ragged)
    # The XLA path is tens of times slower: one turn is enough.
    turns = 1 if kernel.label == "xla" else time.turns(time.floor(case.moved, case.flops))
    args = case.queries_of(), case.all_pools(pages), (ragged, work)
    found: list[float] = time.seconds(reading(kernel.call, turns), args, turns * case.pools, samples)
    return found


def plan(time: Timing, case: Case, kernel: Kernel) -> None:
    """Time a kernel's plan, which is computed once per step."""
    ragged, _ = case.ragged()
    count = 1 if time.dry else 200

    @jax.jit
    def loop(ragged: Ragged) -> Any:
        def body(_: Any, contexts: jax.Array) -> jax.Array:
            work = kernel.plan(ragged._replace(contexts=contexts))
            return contexts + 0 * jnp.stack([leaf.ravel()[0] for leaf in jax.tree.leaves(work)]).sum()

        return jax.lax.fori_loop(0, count, body, ragged.contexts)

    time.add(case.name, f"plan of {kernel.label}", time.seconds(loop, (ragged,), count), moved=0.0)


def slopes(run: Run) -> None:
    """Fit the two slopes of decode: t = c + alpha * (longest context) + beta * (sum of the other contexts).

    alpha and beta are in seconds per token of context, for one layer on one device. An alpha well above beta means that
    the kernel leaves the longest row to few workers.
    """
    time = Timing(run)
    rows = 3 if time.dry else 64
    longest = (20, 40, 60) if time.dry else (4096, 16384, 65536, 131072)
    others = (10, 20) if time.dry else (512, 2048, 4096)
    base: dict[str, Any] = {}
    if time.dry:
        base = {"page": 16, "heads": 4, "kv_heads": 2, "dim": 64, "dtype": jnp.float16, "pools": 2}
    case = Case("slopes", ((1, longest[-1]), *((1, others[-1]),) * (rows - 1)), **base)
    # A dry run tests only the fit, for which an interpreted kernel would be needlessly slow.
    kernel = ours.xla(case) if time.dry else next(iter(ours.decode_kernels(case, dry=False)))
    ragged, pages = case.ragged()
    turns = time.turns((time.floor(case.moved) or 4e-3) / 4)
    loop, make = reading(kernel.call, turns), jax.jit(kernel.plan)
    q, pools = case.queries_of(), case.all_pools(pages)
    points = []
    for one in longest:
        for other in others:
            mine = np.array([one, *[other] * (rows - 1)], np.int32)
            # Contexts change but shapes do not, so one program serves all points.
            step = ragged._replace(contexts=jnp.asarray(mine), positions=jnp.asarray(mine - 1))
            found = time.seconds(loop, (q, pools, (step, make(step))), turns * case.pools, samples=10)
            here = Case(f"slopes {one}+{rows - 1}x{other}", tuple((1, int(c)) for c in mine), **base)
            time.add(here.name, kernel.label, found, moved=here.moved, flops=here.flops)
            points.append((one, (rows - 1) * other, min(found)))
    table = np.array(points)
    columns = np.stack([np.ones(len(table)), table[:, 0], table[:, 1]], axis=1)
    fit, *_ = np.linalg.lstsq(columns, table[:, 2], rcond=None)
    run.row(
        "slopes",
        of=f"one layer, {rows} rows, H{case.heads} K{case.kv_heads} D{case.dim}, least squares of {len(points)} points",
        constant_us=1e6 * fit[0],
        alpha_ns_per_token=1e9 * fit[1],
        beta_ns_per_token=1e9 * fit[2],
        worst_residual_us=1e6 * float(np.abs(columns @ fit - table[:, 2]).max()),
    )
