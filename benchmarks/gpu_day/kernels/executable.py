"""An executable that was compiled on a machine without a GPU, and runs on this one: is that possible, and right?"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_day.part import Run, Skip

from . import ours
from .cases import Case

NAME = "decode.executable"  # in the state's files


def _portable() -> tuple[Callable[..., Any], Case]:
    """Return the program that is compiled elsewhere, a decode of a few rows, and its case."""
    case = Case("traveled decode", ((1, 700), (1, 64), (1, 333)))
    kernel = next(iter(ours.decode_kernels(case, dry=False)))

    def program(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Any) -> jax.Array:
        out: jax.Array = kernel.call(q, k, v, ragged, kernel.plan(ragged))[0]
        return out

    return program, case


def build(folder: Path) -> None:
    """Compile for an H200 without one, and write the executable to a folder; with the ptxas of this machine."""
    from jax.experimental.serialize_executable import serialize
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.gate.targets import TARGETS

    program, case = _portable()
    ragged, pages = case.ragged()
    mesh = Mesh(np.array(TARGETS["h200"].devices()[:1]), ("x",))
    here = NamedSharding(mesh, PartitionSpec())

    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)

    pool = jax.ShapeDtypeStruct((pages, case.page, case.kv_heads, case.dim), case.kv_dtype, sharding=here)
    q = jax.ShapeDtypeStruct((case.tokens, case.heads, case.dim), case.dtype, sharding=here)
    lowered = jax.jit(program, out_shardings=here).lower(q, pool, pool, jax.tree.map(described, ragged))
    path = folder / NAME
    path.write_bytes(pickle.dumps(serialize(lowered.compile())))
    print(f"wrote {path}, compiled by jax {jax.__version__} without a device")


def load(run: Run) -> None:
    """Run an executable that `build` made elsewhere, and compare it with the XLA path."""
    from jax.experimental.serialize_executable import deserialize_and_load

    path = run.folder / NAME
    if not path.exists():
        raise Skip("none was carried: `--build-executable` makes one where the compile gate is installed")
    _, case = _portable()
    ragged, pages = case.ragged()
    q, (k, v) = case.queries_of(), case.pool(pages, 1)
    began = time.perf_counter()
    # Safe only for files that `build` wrote: unpickling runs arbitrary code.
    loaded = deserialize_and_load(*pickle.loads(path.read_bytes()))
    seconds = time.perf_counter() - began
    got, want = loaded(q, k, v, ragged), ours.xla(case).call(q, k, v, ragged, ())
    error = float(jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32)))
    run.fact("traveled executable", {"load_s": seconds, "error": error})
    assert error < 8e-3, f"a program compiled elsewhere is wrong here: relative error {error:.2e}"
