"""The borders of top-k, top-p and min-p on Hopper: see `border_search.py`. One block a row, mostly one look at it.

Floor: the bytes of the logits over the bandwidth, once. Logits are float32; a row begins at a multiple of 16 bytes, as
TMA asks, so V is a multiple of 4.

Letters: G rows, V vocabulary, L lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.aot.cases import Case, shapes
from pallas_kernels.border_search import Found, Options
from pallas_kernels.hopper.borders_body import ROW, Shape, body
from pallas_kernels.hopper.spec import SMEM
from pallas_kernels.interpret import Interpret

WARPGROUP = 128


@dataclass(frozen=True)
class Config:
    """How a row is looked at."""

    lanes: int = 512  # L
    tile: int = 2048  # logits that are copied together
    stages: int = 4

    def validate(self, vocab: int) -> None:
        """Raises ValueError, naming the value, where this config cannot look at rows of `vocab` logits."""
        if vocab % 4:
            raise ValueError(f"{vocab=} must be a multiple of 4: a row begins at a multiple of 16 bytes")
        if self.lanes % WARPGROUP or self.lanes < WARPGROUP or self.tile % self.lanes:
            raise ValueError(f"{self.lanes=} must be a multiple of {WARPGROUP} and divide {self.tile=}")
        if vocab < self.tile:
            raise ValueError(f"{vocab=} must be at least {self.tile=}")
        if self.stages < 1:
            raise ValueError(f"{self.stages=} must be positive")
        if (size := self.smem_bytes()) > SMEM:
            raise ValueError(f"{self} needs {size} bytes of shared memory; a block has {SMEM}")

    def smem_bytes(self) -> int:
        """Shared memory of a block, barriers and what sums take included."""
        return 4 * self.stages * self.tile + 2048


def heuristic(vocab: int) -> Config:
    """A config for rows of `vocab` logits that is expected to be good."""
    fits = (Config(lanes, lanes * each) for lanes, each in ((512, 4), (128, 4), (128, 1)))
    return next((config for config in fits if config.tile <= vocab // 2), Config(128, 128))


def supports(vocab: int) -> str | None:
    """None, or why no config looks at rows of `vocab` logits."""
    try:
        heuristic(vocab).validate(vocab)
    except ValueError as reason:
        return str(reason)
    return None


def borders(x: jax.Array, options: Options, *, config: Config, interpret: Interpret = None) -> Found:
    """Of logits x [G, V] float32 what each row keeps at least, and how often it was swept, [G]; see `border_search`."""
    rows, vocab = x.shape
    config.validate(vocab)
    if x.dtype != jnp.float32 or any(one.shape != (rows,) or one.dtype != jnp.float32 for one in options):
        raise ValueError(f"x {x.dtype} {x.shape} must be float32, and options float32 [{rows}]: {options}")
    shape = Shape(vocab, config.lanes, config.tile, config.stages)
    run = compat.kernel(
        body(shape),
        out=(jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        scratch=shape.scratch(),
        grid=((ROW, rows),),
        threads=("warpgroup", 1),
        interpret=interpret,
    )
    return Found(*run(x, *options))


VOCABULARIES = {"llama3": 128256, "qwen3": 151936, "opt": 50272}


def cases() -> Iterator[Case]:
    """Configs in use, for the compile gate: vocabularies of what is served, and few rows."""
    for name, vocab in VOCABULARIES.items():
        for rows in (1, 256):
            yield _case(name, rows, vocab, usual=rows == 256)
    yield _case("small", 32, 4096)


def _case(name: str, rows: int, vocab: int, usual: bool = True) -> Case:
    def program(x: jax.Array, *options: jax.Array) -> Found:
        return borders(x, Options(*options), config=heuristic(vocab))

    options = [((rows,), jnp.float32)] * len(Options._fields)
    return Case(
        name=f"borders {name} r{rows}",
        program=program,
        arguments=shapes(((rows, vocab), jnp.float32), *options),
        usual=usual,
    )
