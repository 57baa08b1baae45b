"""The cases of the compile gate: each operation lists its own (`ops/<op>/cases.py`), and the gate collects them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Modules that offer `cases()`. jaxserve's, with whole engine steps, is named and not imported, because kernels do not
# depend on the engine.
GPU = (
    "pallas_kernels.ops.paged_attention.cases",
    "pallas_kernels.ops.mla.cases",
    "pallas_kernels.ops.kv_write.cases",
    "pallas_kernels.ops.grouped_matmul.cases",
    "pallas_kernels.ops.gated_matmul.cases",
    "pallas_kernels.ops.quantized_matmul.cases",
    "pallas_kernels.ops.sampling_threshold.cases",
    "pallas_kernels.ops.kv_pages.cases",
    "jaxserve.engine.startup.aot",
)
TPU = (
    "pallas_kernels.ops.paged_attention.tpu.cases",
    "pallas_kernels.attention.cases",
    "jaxserve.engine.startup.aot_tpu",
)
KERNELS_HOLD, STEPS_HOLD = 1 << 26, 1 << 20


@dataclass(frozen=True)
class Compilable:
    """A program that the gate can compile and check."""

    name: str  # in reports, under which bounds are recorded: "decode wgmma bf16 page64 q1", "llama3-8b tp1 decode 64"
    program: Callable[..., Any]
    _: KW_ONLY
    needs: frozenset[str] = frozenset()  # instructions that the machine code must contain: "wgmma", "mma", "tma"
    least_jax: tuple[int, int] = (0, 10)  # the oldest jax version that supports it
    least_memory: int = 0  # bytes of the smallest device that holds the program
    target: str = ""  # the only target to compile for; "": all of its platform
    usual: bool = True  # whether every run compiles it; other cases need `--all`
    devices: int = 1  # of the mesh
    held: int = 0  # arguments of more bytes than this are pools or weights, which must not be copied
    command_buffers: int | None = None  # maximum number of CUDA graphs it may be cut into; None: any
    most_moved: int | None = None  # maximum bytes that its kernels read and write together; None: any
    layers: int = 0  # of the model that it is a step of; 0: it is no step
    flags: tuple[str, ...] = ()  # XLA flags beyond the defaults, as in XLA_FLAGS

    @property
    def most_temp(self) -> int | None:
        """Maximum bytes of temporaries, whatever is recorded; None: as recorded."""
        return None

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """Lower the program for `devices` devices."""
        raise NotImplementedError


@dataclass(frozen=True)
class Case(Compilable):
    """One kernel to compile for a device that is not present; the gate adds shardings to the arguments' shapes.

    `donate` lists the positions of arguments that the program updates in place: it must alias all of
    them, and have at most `scratch` bytes of temporaries.
    """

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    donate: tuple[int, ...] = ()
    scratch: int = field(default=0, kw_only=True)
    held: int = field(default=KERNELS_HOLD, kw_only=True)

    @property
    def most_temp(self) -> int | None:
        return self.scratch if self.donate else None

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        whole = NamedSharding(mesh, PartitionSpec())
        placed = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=whole) for each in self.arguments]
        return jax.jit(partial(self.program), donate_argnums=self.donate).lower(*placed)


@dataclass(frozen=True)
class Step(Compilable):
    """A program of an engine; `program(mesh)` lowers it with the engine's shardings and donation."""

    held: int = field(default=STEPS_HOLD, kw_only=True)

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        lowered: jax.stages.Lowered = self.program(mesh)
        return lowered


def shapes(*pairs: tuple[Sequence[int], Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Make arguments from (shape, dtype) pairs."""
    return tuple(jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in pairs)


def step_shapes(tokens: int, rows: int, pages: int) -> list[tuple[tuple[int, ...], Any]]:
    """Return the shapes and dtypes of the arrays of `Ragged`, with `pages` columns of the block tables."""
    return [*[((tokens,), np.int32)] * 3, *[((rows,), np.int32)] * 3, ((rows, pages), np.int32)]


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """Make a mesh over the axis `tp`."""
    return Mesh(np.array(devices), ("tp",))


def collect(modules: Iterable[str]) -> list[Compilable]:
    """Return the cases of all modules, in order; raise ValueError if two have the same name."""
    cases: list[Compilable] = [case for module in modules for case in import_module(module).cases()]
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"duplicate case names: {', '.join(twice)}")
    return cases


def installed(modules: Iterable[str]) -> list[str]:
    """Return the modules whose package is installed; without jaxserve there are no engine steps."""
    return [module for module in modules if find_spec(module.split(".")[0]) is not None]
