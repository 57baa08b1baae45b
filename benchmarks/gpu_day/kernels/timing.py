"""Time kernels on the device, and record rows with the shares of the measured ceilings.

A kernel is timed inside one jitted loop that cycles through several pools, so that reads miss the level-2 cache. Each
call depends on the previous one, so that XLA neither reorders nor removes calls.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.gpu_day.child import in_a_line
from benchmarks.gpu_day.part import Run, Skip

POOLS = 4
SLOW = 3.0  # seconds for the samples of one row; slower kernels get fewer samples
LEAST = 4.0  # seconds that must be left to start another measurement
COPY, MATMUL = "copy_tb_s", "matmul_tflop_s"  # facts: the measured ceilings


class Timing:
    """The timings of one part. Without measured ceilings, the columns that need them stay empty."""

    def __init__(self, run: Run, samples: int = 20) -> None:
        self.run, self.samples = run, samples
        self.dry = run.dry
        self.copy = _scaled(run.facts.get(COPY))  # bytes per second, read plus written
        self.matmul = _scaled(run.facts.get(MATMUL))  # bfloat16 FLOP/s

    def floor(self, moved: float, flops: float = 0.0) -> float | None:
        """Return the seconds that no kernel can beat, or None if a ceiling was not measured."""
        return max(moved / self.copy, flops / self.matmul) or None if self.copy and self.matmul else None

    def turns(self, seconds: float | None) -> int:
        """Return the iterations over all pools that take about 20 ms, if a call takes at least `seconds`."""
        return 1 if self.dry else max(2, min(100, round(0.02 / (POOLS * max(seconds or 1e-3, 5e-6)))))

    def seconds(self, loop: Callable[..., Any], args: Sequence[Any], calls: int, samples: int | None = None) -> Any:
        """Return two medians of the seconds per call of `loop(*args)`, which makes `calls` calls.

        A dry run times one cold call.
        """
        began = time.perf_counter()
        jax.block_until_ready(loop(*args))  # compiles, and warms up
        if self.dry:
            return [(time.perf_counter() - began) / calls] * 2
        began = time.perf_counter()
        jax.block_until_ready(loop(*args))
        count = min(samples or self.samples, max(3, int(SLOW / (time.perf_counter() - began))))
        found = []
        for _ in range(2):
            times = []
            for _ in range(count):
                began = time.perf_counter()
                jax.block_until_ready(loop(*args))
                times.append(time.perf_counter() - began)
            found.append(median(times) / calls)
        return found

    def add(
        self, case: str, kernel: str, found: Sequence[float], *, moved: float, flops: float = 0.0, **more: Any
    ) -> None:
        """Add a row from the medians of `seconds`, the bytes moved and the FLOPs."""
        best, floor = min(found), self.floor(moved, flops)
        self.run.row(
            "kernels",
            case=case,
            kernel=kernel,
            us=found[0] * 1e6,
            us_again=found[1] * 1e6,
            gb=moved / 1e9,
            tb_s=moved / best / 1e12,
            of_copy=100 * moved / best / self.copy if self.copy else None,
            tflop_s=flops / best / 1e12,
            of_matmul=100 * flops / best / self.matmul if self.matmul else None,
            x_floor=best / floor if floor else None,
            **more,
        )

    @contextmanager
    def each(self) -> Iterator[Callable[[str, Callable[[], Any]], Any]]:
        """Yield attempt(name, work), which returns None if the work fails; at the end the part fails for all of them.

        One kernel that does not compile costs its own row only. Work that cannot run here is a fact, not a failure,
        unless nothing else was measured.
        """
        failed: list[str] = []
        skipped: dict[str, str] = {}
        done = 0

        def attempt(name: str, work: Callable[[], Any]) -> Any:
            nonlocal done
            if self.run.left() < LEAST:
                failed.append(f"{name}: no time left")
                return None
            try:
                found = work()
            except Skip as why:
                skipped[name] = str(why)
            except Exception as error:
                traceback.print_exc()
                failed.append(f"{name}: {in_a_line(error)}")
            else:
                done += 1
                return found
            return None

        yield attempt
        if failed:
            raise RuntimeError("; ".join(failed))
        if skipped and not done:
            raise Skip("; ".join(dict.fromkeys(skipped.values())))
        for name, why in skipped.items():
            self.run.row("skipped", what=name, why=why)


def _scaled(tera: float | None) -> float | None:
    return None if tera is None else 1e12 * tera


def stir(x: jax.Array, out: Any) -> jax.Array:
    """Return `x` with one element changed by `out`, so that the next call depends on this one."""
    first = jax.tree.leaves(out)[0]
    return x.at[(0,) * x.ndim].add((first[(0,) * first.ndim] * 1e-3).astype(x.dtype))


def reading(call: Callable[..., Any], turns: int) -> Callable[..., jax.Array]:
    """Return a jitted loop(q, pools, rest) that runs call(q, *pool, *rest) `turns` times on every pool."""
    once = jax.jit(call)  # lowered once, however many pools there are

    @jax.jit
    def loop(q: jax.Array, pools: Sequence[Any], rest: Sequence[Any]) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            for pool in pools:
                q = stir(q, once(q, *pool, *rest))
            return q

        done: jax.Array = lax.fori_loop(0, turns, body, q)
        return done

    return loop


def writing(call: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """Return a jitted loop(pools, rest) that runs the in-place call(pool, *rest) -> pool; pools are donated."""
    once = jax.jit(call)

    @partial(jax.jit, donate_argnums=0)
    def loop(pools: Any, rest: Sequence[Any]) -> Any:
        return lax.fori_loop(0, turns, lambda _, all_: [once(pool, *rest) for pool in all_], pools)

    return loop


class InPlace:
    """A `writing` loop that keeps its donated pools between calls."""

    def __init__(self, loop: Callable[..., Any], pools: Any) -> None:
        self._loop, self._pools = loop, pools

    def __call__(self, *rest: Any) -> Any:
        self._pools = self._loop(self._pools, rest)
        return self._pools


def normal(shape: Sequence[int], dtype: Any, seed: int) -> jax.Array:
    """Draw normal numbers on the device."""
    made: jax.Array = jax.random.normal(jax.random.key(seed), tuple(shape), jnp.float32).astype(dtype)
    return made


def interpreter_or_none(dry: bool) -> Any:
    """Return the `interpret` of Mosaic kernels. Raises Skip in a dry run whose jax cannot interpret Hopper kernels."""
    from pallas_kernels.mosaic import compat
    from pallas_kernels.mosaic.interpret import interpreter

    if dry and not compat.DETECTS_RACES:
        raise Skip(f"a dry run of Mosaic kernels needs the interpreter of jax 0.11; this is {jax.__version__}")
    return interpreter() if dry else None
