"""Products of a mixture of experts on Hopper: each row with the weights of its own expert.

    out[r] = x[r] @ weight[owner[r]]

Rows lie by expert (plan/experts.py), and only experts that have rows are read. Two forms of one kernel, which is
persistent and warp-specialised. For prefill a tile of rows is the left operand of the tensor core, whose least is 64
rows. For decode the operands are swapped: outputs take its 64 rows and up, tokens its columns, of which 8 will do,
and as long as an expert's rows are one tile its weights are streamed once. Both operands are in shared memory in both
forms: ptxas before 13.3 may compile a left operand in registers wrongly.

Floor: bytes of the experts that have rows over the bandwidth (277 us for a layer of Qwen3-30B-A3B and 64 tokens), or
2 R I O operations (391 us for 4,096 tokens).

Letters: T tokens, Q pairs of a token and an expert, R rows, X experts, I what is summed over, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.aot.cases import Case, shapes
from pallas_kernels.hopper.grouped_body import ALIGN, DEPTH, GRID, ROLE, WIDE, Shape, body
from pallas_kernels.hopper.spec import CORES, SMEM
from pallas_kernels.interpret import Interpret
from pallas_kernels.plan.experts import Groups, plan_experts

ROWS = 64  # of the least product


@dataclass(frozen=True)
class Spec:
    """What a config is chosen for. X, I and O are those of one shard."""

    pairs: int  # Q
    experts: int  # X
    width: int  # I
    outputs: int  # O
    dtype: Any = jnp.bfloat16
    cores: int = CORES


@dataclass(frozen=True)
class Config:
    """How one shape is computed."""

    rows: int = 128  # of a tile
    columns: int = 256  # outputs of a tile
    stages: int = 4  # tiles on the way
    consumers: int = 2  # warpgroups that multiply
    swapped: bool = False  # tokens are the columns of the tensor core's product
    blocks: int = CORES

    def validate(self, spec: Spec) -> None:
        """Raises ValueError, naming the value, where this config cannot compute the spec."""
        if jnp.dtype(spec.dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            raise ValueError(f"{spec.dtype=} must be bfloat16 or float16")
        if spec.width % DEPTH or spec.outputs % WIDE:
            raise ValueError(f"{spec.width=} and {spec.outputs=} must be multiples of {DEPTH} and {WIDE}")
        if self.consumers not in (1, 2) or min(self.stages, self.blocks) < 1:
            raise ValueError(f"{self.consumers=} must be 1 or 2, {self.stages=} and {self.blocks=} positive")
        if self.columns not in (64, 128, 192, 256) or spec.outputs % self.columns:
            raise ValueError(f"{self.columns=} must be 64, 128, 192 or 256 and divide {spec.outputs=}")
        if self.swapped and (self.rows not in (8, 16, 32, 64, 128) or self.columns % (ROWS * self.consumers)):
            raise ValueError(
                f"swapped, {self.rows=} must be 8, 16, 32, 64 or 128, and {self.columns=} a multiple of {ROWS} for "
                f"each of {self.consumers=}"
            )
        if not self.swapped and self.rows not in (ROWS * self.consumers, 2 * ROWS * self.consumers):
            raise ValueError(f"{self.rows=} must be {ROWS} or {2 * ROWS} for each of {self.consumers=}")
        if (held := self.rows * self.columns // self.consumers) > ROWS * 256:
            raise ValueError(f"{self} has {held} sums a warpgroup; its registers hold {ROWS * 256}")
        if (size := self.smem_bytes()) > SMEM:
            raise ValueError(f"{self} needs {size} bytes of shared memory; a block has {SMEM}")

    def smem_bytes(self) -> int:
        """Shared memory of a block, barriers and alignment included; results are of 4 bytes at most."""
        stored = self.rows * (self.consumers if self.swapped else 1)
        return self.stages * DEPTH * (self.rows + self.columns) * 2 + stored * WIDE * 4 + 2048


def plan(chosen: jax.Array, experts: int, tile: int | None = None) -> Groups:
    """The work for chosen [Q], once per layer: both of its products share it. `tile` None: as `heuristic` has it."""
    tile = tile or tile_of(len(chosen), experts)
    return plan_experts(chosen, experts=experts, tile=tile, align=ALIGN)


def tile_of(pairs: int, experts: int) -> int:
    """Rows of a tile. While experts have few rows they are room for eight times the mean, and operands are swapped."""
    mean = -(-pairs // experts)
    if mean > 32:
        return 2 * ROWS
    return next(rows for rows in (8, 16, 32, 64) if rows >= min(ROWS, 8 * mean, pairs))


def heuristic(spec: Spec) -> Config:
    """A config that is expected to be good, for the work of `plan`."""
    rows = tile_of(spec.pairs, spec.experts)
    swapped = rows <= ROWS
    # Swapped, wide strips would leave some blocks without any: there are as many rows of them as experts that are hit.
    widths = (128,) if swapped else (256, 192, 128)
    columns = next((width for width in widths if spec.outputs % width == 0), 64)
    consumers = 1 if swapped and columns == ROWS else 2
    config = Config(rows, columns, 1, consumers, swapped, spec.cores)
    for stages in range(12 if swapped else 6, 1, -1):
        deep = replace(config, stages=stages)
        if deep.smem_bytes() <= SMEM:
            return deep
    return replace(config, stages=1)


def supports(spec: Spec) -> str | None:
    """None, or why no config computes the spec."""
    for pairs in (1, 2 * ROWS * spec.experts):  # of both forms
        one = replace(spec, pairs=pairs)
        try:
            heuristic(one).validate(one)
        except ValueError as reason:
            return str(reason)
    return None


def candidates(spec: Spec) -> Iterator[Config]:
    """Configs worth timing for the spec, the heuristic first; the compile gate drops those that spill."""
    some = (
        Config(rows, columns, stages, consumers, swapped, spec.cores)
        for swapped, rows, columns, stages, consumers in product(
            (True, False), (8, 16, 32, 64, 128, 256), (64, 128, 192, 256), (3, 4, 6, 8, 12), (1, 2)
        )
    )
    for config in dict.fromkeys(chain([heuristic(spec)], some)):
        try:
            config.validate(spec)
        except ValueError:
            continue
        yield config


def grouped_matmul(
    x: jax.Array,  # [R, I], rows as `work` lays them
    weight: jax.Array,  # [X, I, O]
    work: Groups,
    *,
    out_dtype: Any = None,
    config: Config,
    interpret: Interpret = None,
) -> jax.Array:
    """[R, O] of `out_dtype`, summed in float32; anything at all in rows that are nobody's.

    `work` is `plan(chosen, X, config.rows)`.
    """
    (rows, width), (experts, _, outputs) = x.shape, weight.shape
    out_dtype = jnp.dtype(out_dtype or x.dtype)
    config.validate(Spec(rows, experts, width, outputs, x.dtype))
    if weight.dtype != x.dtype or weight.shape[1] != width or rows != len(work.source):
        raise ValueError(f"{x.dtype}{x.shape}, {weight.dtype}{weight.shape} and {len(work.source)} rows do not fit")
    tiles = len(work.expert)
    shape = Shape(
        rows=config.rows,
        columns=config.columns,
        stages=config.stages,
        consumers=config.consumers,
        swapped=config.swapped,
        blocks=min(config.blocks, tiles * (outputs // config.columns)),
        strips=outputs // config.columns,
        steps=width // DEPTH,
        dtype=x.dtype,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    run = compat.kernel(
        body(shape),
        out=jax.ShapeDtypeStruct((rows, outputs), out_dtype),
        scratch=shape.scratch(),
        grid=((GRID, shape.blocks),),
        threads=(ROLE, config.consumers + 1),
        interpret=interpret,
    )
    out: jax.Array = run(x, weight, work.expert, work.begin, work.length, work.used)
    return out


# X, I and O of the two products of a layer: gate and up together, and down.
MODELS = {"qwen3-30b-a3b": (128, 2048, 768), "qwen3-30b-a3b tp4": (32, 2048, 768), "gpt-oss-20b": (32, 2880, 2880)}
CHOSEN = {"qwen3-30b-a3b": 8, "qwen3-30b-a3b tp4": 8, "gpt-oss-20b": 4}


def cases() -> Iterator[Case]:
    """Configs in use, for the compile gate: both products of decode and prefill steps of what is served."""
    for model, (experts, dim, ff_dim) in MODELS.items():
        usual = model == "qwen3-30b-a3b"
        for tokens in (1, 64, 256, 4096):
            pairs = tokens * CHOSEN[model]
            up = Spec(pairs, experts, dim, 2 * ff_dim)
            down = Spec(pairs, experts, ff_dim, dim)
            yield _case(f"{model} up", up, None, tokens, usual and tokens > 1)
            yield _case(f"{model} down", down, jnp.float32, tokens, usual and tokens > 1)
    yield _case("qwen3-30b-a3b up", Spec(512, 128, 2048, 1536, jnp.float16), None, 64, True)


def _case(name: str, spec: Spec, out_dtype: Any, tokens: int, usual: bool) -> Case:
    config = heuristic(spec)
    rows = len(jax.eval_shape(lambda: plan(jnp.zeros(spec.pairs, jnp.int32), spec.experts)).source)
    form = "swapped" if config.swapped else "straight"
    return Case(
        name=f"grouped {name} {form} {jnp.dtype(spec.dtype).name} t{tokens}",
        program=partial(_step, config=config, out_dtype=out_dtype),
        arguments=shapes(
            ((rows, spec.width), spec.dtype),
            ((spec.experts, spec.width, spec.outputs), spec.dtype),
            ((spec.pairs,), jnp.int32),
        ),
        needs=frozenset({"wgmma", "tma"}),
        usual=usual,
    )


def _step(x: jax.Array, weight: jax.Array, chosen: jax.Array, *, config: Config, out_dtype: Any) -> jax.Array:
    """The plan and one product."""
    return grouped_matmul(x, weight, plan(chosen, len(weight)), out_dtype=out_dtype, config=config)
