"""Time programs on the device, and record rows with the shares of the measured ceilings.

A kernel is timed inside one jitted loop that cycles through several pools, so that reads miss the level-2 cache. Each
call depends on the previous one, so that XLA neither reorders nor removes calls. A program is compiled before its
process takes the device's lock, so that compilation runs beside other measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.dummy import STD, sums

from .device import Device, limited
from .part import NO_MOSAIC, Run, Skip

POOLS = 4
SLOW = 3.0  # seconds for the samples of one row; slower kernels get fewer samples
COMPILED, MADE, TIMED = 60.0, 20.0, 20.0  # seconds after which compiling, making arrays or timing counts as hanging
COPY, MATMUL = "copy_tb_s", "matmul_tflop_s"  # facts: the measured ceilings
MOSAIC = "mosaic"  # fact: the first kernel of this repository is right here


@dataclass(frozen=True)
class Headline:
    """A kernel in a case: `call(q, *pool, *rest)`, or in place `call(pool, *rest) -> pool`."""

    case: str
    kernel: str
    call: Callable[..., Any]
    make: Callable[[], Any]  # (q, pools, rest), or in place (pools, rest); traceable
    moved: float  # bytes of one call
    flops: float = 0.0
    in_place: bool = False
    config: Any = ""

    @property
    def name(self) -> str:
        return f"{self.case}: {self.kernel}"


class Timing:
    """The timings of one part. Without measured ceilings, the columns that need them stay empty."""

    def __init__(self, run: Run, samples: int = 20) -> None:
        self.run, self.samples, self.dry = run, samples, run.dry
        self.copy = _scaled(run.facts.get(COPY))  # bytes per second, read plus written
        self.matmul = _scaled(run.facts.get(MATMUL))  # bfloat16 FLOP/s
        self.device = Device(run.scratch)

    def floor(self, moved: float, flops: float = 0.0) -> float | None:
        """Return the seconds that no kernel can beat, or None if a ceiling was not measured."""
        return max(moved / self.copy, flops / self.matmul) or None if self.copy and self.matmul else None

    def turns(self, seconds: float | None) -> int:
        """Return the iterations over all pools that take about 20 ms, if a call takes at least `seconds`."""
        return 1 if self.dry else max(2, min(100, round(0.02 / (POOLS * max(seconds or 1e-3, 5e-6)))))

    def all(self, headlines: Iterable[Headline]) -> None:
        """Time each as an item of the part."""
        self.run.each({one.name: partial(self.measure, one) for one in headlines})

    def measure(self, one: Headline) -> Mapping[str, Any]:
        """Compile, then time alone on the device; the row goes to the table `kernels`."""
        if one.kernel.startswith(MOSAIC):
            needs_mosaic(self.run)
        began = time.perf_counter()
        turns = self.turns(self.floor(one.moved, one.flops))
        loop = (writing if one.in_place else reading)(one.call, turns)
        with limited(1e3 if self.dry else COMPILED):
            compiled = loop.lower(*jax.eval_shape(one.make)).compile()
            make = jax.jit(one.make).lower().compile()
        compiling = time.perf_counter() - began
        with self.device.shared(MADE):
            arrays = jax.block_until_ready(make())
        pools = len(arrays[0 if one.in_place else 1])
        with self.device.alone(1e3 if self.dry else TIMED):
            timed = Donated(compiled, *arrays) if one.in_place else partial(compiled, *arrays)
            found = self.seconds(timed, turns * pools)
        self.add(one.case, one.kernel, found, moved=one.moved, flops=one.flops, config=str(one.config or ""))
        return {"compile_s": round(compiling, 2), "us": 1e6 * min(found)}

    def seconds(self, call: Callable[[], Any], calls: int, samples: int | None = None) -> list[float]:
        """Return two medians of the seconds of one of the `calls` that `call()` makes; a dry run takes one sample."""
        jax.block_until_ready(call())
        began = time.perf_counter()
        jax.block_until_ready(call())
        took = time.perf_counter() - began
        if self.dry:
            return [took / calls] * 2
        count = min(samples or self.samples, max(3, int(SLOW / took)))
        found = []
        for _ in range(2):
            times = []
            for _ in range(count):
                began = time.perf_counter()
                jax.block_until_ready(call())
                times.append(time.perf_counter() - began)
            found.append(median(times) / calls)
        return found

    def add(
        self, case: str, kernel: str, found: Sequence[float], *, moved: float, flops: float = 0.0, **more: Any
    ) -> None:
        """Add a row from the medians of `seconds`, the bytes moved and the FLOPs."""
        best, floor = min(found), self.floor(moved, flops)
        self.run.row(
            "kernels", case=case, kernel=kernel, us=found[0] * 1e6, us_again=found[1] * 1e6, gb=moved / 1e9,
            tb_s=moved / best / 1e12, of_copy=100 * moved / best / self.copy if self.copy else None,
            tflop_s=flops / best / 1e12, of_matmul=100 * flops / best / self.matmul if self.matmul else None,
            x_floor=best / floor if floor else None, **more,
        )  # fmt: skip


def _scaled(tera: float | None) -> float | None:
    return None if tera is None else 1e12 * tera


def reading(call: Callable[..., Any], turns: int) -> Any:
    """Return a jitted loop(q, pools, rest) that runs call(q, *pool, *rest) `turns` times on every pool."""
    once = jax.jit(call)  # lowered once, however many pools there are

    def stirred(x: jax.Array, out: Any) -> jax.Array:
        """Change one element of `x` by `out`, so that the next call depends on this one."""
        first = jax.tree.leaves(out)[0]
        return x.at[(0,) * x.ndim].add((first[(0,) * first.ndim] * 1e-3).astype(x.dtype))

    @jax.jit
    def loop(q: jax.Array, pools: Sequence[Any], rest: Sequence[Any]) -> Any:
        def body(_: Any, q: jax.Array) -> jax.Array:
            for pool in pools:
                q = stirred(q, once(q, *pool, *rest))
            return q

        return lax.fori_loop(0, turns, body, q)

    return loop


def writing(call: Callable[..., Any], turns: int) -> Any:
    """Return a jitted loop(pools, rest) that runs the in-place call(pool, *rest) -> pool; pools are donated."""
    once = jax.jit(call)

    @partial(jax.jit, donate_argnums=0)
    def loop(pools: Any, rest: Sequence[Any]) -> Any:
        return lax.fori_loop(0, turns, lambda _, all_: [once(pool, *rest) for pool in all_], pools)

    return loop


class Donated:
    """A `writing` loop that keeps its donated pools between calls."""

    def __init__(self, loop: Callable[..., Any], pools: Any, rest: Any) -> None:
        self._loop, self._pools, self._rest = loop, pools, rest

    def __call__(self) -> Any:
        self._pools = self._loop(self._pools, self._rest)
        return self._pools


def normal(shape: Sequence[int], dtype: Any, seed: int) -> jax.Array:
    """Make numbers near normal on the device; XLA would compile a generator of `jax.random` anew for each seed."""
    key = np.random.SeedSequence(seed).generate_state(2)
    made: jax.Array = (sums(key, tuple(shape)).astype(jnp.float32) / STD).astype(dtype)
    return made


def needs_mosaic(run: Run) -> None:
    """Raise Skip if the kernels of this repository are not right here, or cannot run."""
    interpreter_or_none(run.dry)
    if MOSAIC not in run.facts:
        raise Skip(NO_MOSAIC)


def interpreter_or_none(dry: bool) -> Any:
    """Return the `interpret` of Mosaic kernels. Raises Skip in a dry run whose jax cannot interpret Hopper kernels."""
    from pallas_kernels.mosaic import compat
    from pallas_kernels.mosaic.interpret import interpreter

    if dry and not compat.DETECTS_RACES:
        raise Skip(f"a dry run of Mosaic kernels needs the interpreter of jax 0.11; this is {jax.__version__}")
    return interpreter() if dry else None
