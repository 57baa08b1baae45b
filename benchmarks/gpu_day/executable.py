"""An executable that was compiled on a machine without a GPU, and runs on this one: is that possible, and right?"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .headlines import attention_of, xla_attention
from .part import Run, Skip
from .shapes import Case

NAME = "decode.executable"  # in the carried folder
CASE = Case("traveled decode", ((1, 700), (1, 64), (1, 333)))


def build(folder: Path) -> Path:
    """Compile for an H200 without one, and write the executable to a folder; with the ptxas of this machine."""
    from jax.experimental.serialize_executable import serialize
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pallas_kernels.gate.targets import TARGETS

    kernel = attention_of(CASE, dry=False)
    mesh = Mesh(np.array(TARGETS["h200"].devices()[:1]), ("x",))
    here = NamedSharding(mesh, PartitionSpec())

    def program(q: jax.Array, pool: Any, rest: Any) -> jax.Array:
        out: jax.Array = kernel.call(q, *pool, *rest)[0]
        return out

    q, pools, rest = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), jax.eval_shape(kernel.make)
    )
    lowered = jax.jit(program, out_shardings=here).lower(q, pools[0], rest)
    path = folder / NAME
    path.write_bytes(pickle.dumps(serialize(lowered.compile())))
    return path


def load(run: Run) -> None:
    """Run an executable that `build` made elsewhere, and compare it with the XLA path."""
    from jax.experimental.serialize_executable import deserialize_and_load

    path = run.folder / NAME
    if not path.exists():
        raise Skip("none was carried: `--pack` makes one where the compile gate is installed")
    q, pools, rest = jax.jit(attention_of(CASE, dry=False).make)()
    began = time.perf_counter()
    # Safe only for files that `build` wrote: unpickling runs arbitrary code.
    loaded = deserialize_and_load(*pickle.loads(path.read_bytes()))
    seconds = time.perf_counter() - began
    got, want = loaded(q, pools[0], rest), xla_attention(CASE).call(q, *pools[0], rest[0])
    error = float(jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32)))
    run.fact("traveled executable", {"load_s": seconds, "error": error})
    assert error < 8e-3, f"a program compiled elsewhere is wrong here: relative error {error:.2e}"
