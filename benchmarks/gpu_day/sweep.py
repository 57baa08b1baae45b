"""Time candidate configs for what the engine looks up, and write the fastest one that computes the right numbers.

One part tunes one spec. Its key is the one under which the engine looks the config up, whatever the timed step is: the
engine does not know the number of rows, plans decode for 1 or 16 query tokens a row, and prefill for 1.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time as clock
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.mosaic.spec import CORES
from pallas_kernels.ops.paged_attention.api import AttentionSpec
from pallas_kernels.ptxas import trusted

from . import probe
from .headlines import attention_of, scales_of
from .part import Run
from .shapes import Case, cases, numeric_case
from .timing import Timing, interpreter_or_none

CHECKS = 15.0  # seconds kept for the checks of the winners
MOST = {"bfloat16": 8e-3, "float16": 2e-3}  # relative error that rounding explains


def tune(run: Run, op: str, queries: int, case: str) -> None:
    """Tune one op for up to `queries` query tokens a row, timed on the step of a case."""
    interpreter_or_none(run.dry)
    timed_on = cases(run.dry)[case]
    wanted = looked_up(op, timed_on, queries, dry=run.dry)
    found = list(_timed(run, op, timed_on, usable(candidates(op, wanted), probe.machine()["ptxas"])))
    best = fastest_right(found, lambda config: _error(op, timed_on, queries, config, dry=run.dry), run)
    if best is None:
        raise RuntimeError(f"none of {len(found)} configs ran and computed the right numbers")
    seconds, config = best
    run.row(
        "sweep", op=op, **tuned.key_of(wanted), timed_on=case, tried=len(found), heuristic_us=1e6 * found[0][0],
        best_us=1e6 * seconds, best=str(config),
    )  # fmt: skip
    write(run, {"op": op, **tuned.key_of(wanted), "config": dataclasses.asdict(config), "us": 1e6 * seconds})


def looked_up(op: str, case: Case, queries: int, *, dry: bool) -> Any:
    """Return the spec whose key the engine looks up for the model and pages of a case."""
    spec = AttentionSpec(
        platform="gpu", cores=2 if dry else CORES, dtype=jnp.dtype(case.dtype).name, heads=case.heads,
        kv_heads=case.kv_heads, head_dim=case.dim, page=case.page, kv_dtype=jnp.dtype(case.kv_dtype).name,
    )  # fmt: skip
    return next(one for found, one in mosaic_gpu.tuning_specs(spec) if (found, one.queries) == (op, queries))


def candidates(op: str, wanted: Any) -> Iterator[Any]:
    """Yield the heuristic's config, then the others in a random order, as there is time for a few only."""
    from pallas_kernels.ops.paged_attention.hopper import decode, prefill

    first, *others = (decode if op == "decode" else prefill).candidates(wanted)
    random.Random(0).shuffle(others)
    yield from (first, *others)


def usable(configs: Iterable[Any], ptxas: str) -> Iterator[Any]:
    """Yield the configs that this ptxas compiles correctly: before 13.3 it may not, with weights in registers."""
    registers = trusted(ptxas)
    return (config for config in configs if registers or config.p_in_smem)


def _timed(run: Run, op: str, case: Case, configs: Iterable[Any]) -> Iterator[tuple[float, Any]]:
    """Yield (seconds, config) of the configs that run, until the time for checks begins."""
    time = Timing(run, samples=7)
    for index, config in enumerate(configs):
        if index and (run.dry or run.left() < CHECKS):
            break
        try:
            one = attention_of(case, run.dry, config, f"config {index}")
            found = time.measure(one)
        except jax.errors.JaxRuntimeError as error:
            run.row("sweep failures", op=op, config=str(config), why=str(error).splitlines()[0][:200])
        else:
            yield found["us"] / 1e6, config


def fastest_right(
    timed: Sequence[tuple[float, Any]], error: Callable[[Any], tuple[float, float]], run: Run
) -> tuple[float, Any] | None:
    """Return the fastest config whose error is small enough, and record those that are wrong.

    error: returns the relative error of a config and the largest that is right.
    """
    for seconds, config in sorted(timed, key=lambda one: one[0]):
        found, most = error(config)
        if found <= most:
            return seconds, config
        run.row("sweep wrong", config=str(config), us=1e6 * seconds, error=found, most=most)
    return None


def _error(op: str, case: Case, queries: int, config: Any, *, dry: bool) -> tuple[float, float]:
    """Compare a config with the float64 reference on rows around the borders of pages and tiles."""
    from tests.support.kernels import reference

    small = case if dry else numeric_case(case, queries if op == "decode" else 0)
    kernel = attention_of(small, dry, config)
    q, pools, (ragged, work) = jax.jit(kernel.make)()
    out, _ = jax.jit(kernel.call)(q, *pools[0], ragged, work)
    want, _ = reference.attention(q, *pools[0], ragged, scale=small.scale, scales=scales_of(small))
    return float(reference.error(out, want)), MOST[jnp.dtype(small.dtype).name]


def write(run: Run, entry: dict[str, Any]) -> Path:
    """Add an entry to the file of this device, in the format of pallas_kernels/tuned/, in place of an older one."""
    device = jax.devices()[0].device_kind
    path = run.folder / f"{'dry' if run.dry else tuned.name_of(device)}.json"
    key = [entry["op"], *(entry[name] for name in tuned.KEYS)]
    older = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []
    kept = [one for one in older if [one["op"], *(one[name] for name in tuned.KEYS)] != key]
    measured = {"date": clock.strftime("%Y-%m-%d"), "jax": jax.__version__, "ptxas": probe.machine()["ptxas"]}
    whole = {"device": device, "measured": None if run.dry else measured, "entries": [*kept, entry]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return path
