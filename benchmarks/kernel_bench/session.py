"""One run of the kernel benchmark: its rows, failures, deadline, and timing loops.

A part that fails adds one line to the failures, and the run goes on. A kernel is timed inside one jitted loop that
cycles through several pools, so that reads miss the level-2 cache. Each call depends on the previous one, so that XLA
neither reorders nor removes calls.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.report.progress import Callback
from jaxserve.report.table import markdown, print_table

POOLS = 4
SLOW = 3.0  # seconds for the samples of one row; slower kernels get fewer samples
COLUMNS = ("case", "kernel", "us", "again", "GB", "TB/s", "% copy", "TFLOP/s", "% matmul", "x floor", "error")
KEYS = ("case", "kernel", "us", "us_again", "gb", "tb_s", "of_copy", "tflop_s", "of_matmul", "of_floor", "error")


@dataclass
class Ceilings:
    """The measured maximum rates of the device; NaN until measured."""

    copy: float = math.nan  # bytes per second, read plus written
    matmul: float = math.nan  # bfloat16 FLOP/s


@dataclass
class Session:
    dry: bool
    folder: Path
    deadline: float  # by time.perf_counter; infinite in a dry run, which must try every part
    show: Callback
    samples: int = 20
    ceilings: Ceilings = field(default_factory=Ceilings)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    _done: int = 0
    _planned: int = 0

    def expect(self, parts: int) -> None:
        self._planned += parts

    @property
    def parts(self) -> int:
        """Number of parts started or skipped so far."""
        return self._done

    def part(self, name: str, work: Callable[[], Any], *, least: float = 5.0) -> Any:
        """Run a part. Returns None and records a failure if it raises or if less than `least` seconds are left."""
        self._done += 1
        self.show(self._done, max(self._planned, self._done), name)
        left = self.deadline - time.perf_counter()
        if left < least:
            return self._fail(name, f"skipped: {left:.0f} s are left")
        try:
            return work()
        except Exception as error:  # a failing kernel, peer or device must not stop the other parts
            words = str(error).strip().splitlines() or [""]
            return self._fail(name, f"{type(error).__name__}: {words[0][:300]}")
        finally:
            self.save()

    def _fail(self, name: str, why: str) -> None:
        self.failures.append({"part": name, "why": why})
        print(f"{name}: {why}", flush=True)

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

    def turns(self, seconds: float) -> int:
        """Return the iterations over all pools that take about 20 ms, if a call takes at least `seconds`."""
        return 1 if self.dry else max(2, min(100, round(0.02 / (POOLS * max(seconds, 5e-6)))))

    def add(
        self, case: str, kernel: str, found: Sequence[float], *, moved: float, flops: float = 0.0, **more: Any
    ) -> dict[str, Any]:
        """Add a row from the medians of `seconds`, the bytes moved and the FLOPs."""
        best, copy, matmul = min(found), self.ceilings.copy, self.ceilings.matmul
        floor = (max(moved / copy, flops / matmul) if copy > 0 and matmul > 0 else 0.0) or math.nan
        row = {
            "case": case,
            "kernel": kernel,
            "us": found[0] * 1e6,
            "us_again": found[1] * 1e6,
            "gb": moved / 1e9,
            "tb_s": moved / best / 1e12,
            "of_copy": 100 * moved / best / copy,
            "tflop_s": flops / best / 1e12,
            "of_matmul": 100 * flops / best / matmul,
            "of_floor": best / floor,
            **more,
        }
        self.rows.append(row)
        return row

    def table(self) -> list[list[Any]]:
        return [[row.get(key) for key in KEYS] for row in self.rows]

    def save(self) -> None:
        """Write everything measured so far, so that an interrupted run keeps its results."""
        whole = {
            "ceilings": {"copy_tb_s": self.ceilings.copy / 1e12, "matmul_tflop_s": self.ceilings.matmul / 1e12},
            **self.facts,
            "rows": self.rows,
            "failures": self.failures,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "kernels.json").write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
        lines = [markdown(COLUMNS, self.table()), ""]
        lines += [f"* {failed['part']}: {failed['why']}" for failed in self.failures]
        (self.folder / "kernels.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def close(self) -> None:
        print_table("kernels" + (" (dry: tiny shapes, no figures)" if self.dry else ""), COLUMNS, self.table())
        print(f"{len(self.rows)} rows, {len(self.failures)} parts failed or skipped; wrote {self.folder}/kernels.json")


def stir(x: jax.Array, out: Any) -> jax.Array:
    """Return `x` with one element changed by `out`, so that the next call depends on this one."""
    first = jax.tree.leaves(out)[0]
    return x.at[(0,) * x.ndim].add((first[(0,) * first.ndim] * 1e-3).astype(x.dtype))


def reading(call: Callable[..., Any], turns: int) -> Callable[..., jax.Array]:
    """Return a jitted loop(q, pools, rest) that runs call(q, *pool, *rest) `turns` times on every pool."""

    @jax.jit
    def loop(q: jax.Array, pools: Sequence[Any], rest: Sequence[Any]) -> jax.Array:
        def body(_: Any, q: jax.Array) -> jax.Array:
            for pool in pools:
                q = stir(q, call(q, *pool, *rest))
            return q

        done: jax.Array = lax.fori_loop(0, turns, body, q)
        return done

    return loop


def writing(call: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """Return a jitted loop(pools, rest) that runs the in-place call(pool, *rest) -> pool; pools are donated."""

    @partial(jax.jit, donate_argnums=0)
    def loop(pools: Any, rest: Sequence[Any]) -> Any:
        return lax.fori_loop(0, turns, lambda _, all_: [call(pool, *rest) for pool in all_], pools)

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
