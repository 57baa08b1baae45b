"""Design questions that only a device can answer: page size, axis order, kind of matmul, and this ptxas.

Answers come from the measured rows. Also checks an executable that was compiled on a machine without a GPU.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import ours, times
from .cases import Case, decode_cases, prefill_cases
from .session import Session


def registers(session: Session) -> None:
    """Time the kernels with their weights in registers, to compare with shared memory."""
    pairs = (decode_cases(session.dry)[0], ours.decode_kernels), (prefill_cases(session.dry)[0], ours.prefill_kernels)
    for case, kernels in pairs:
        found = session.part(case.name, lambda case=case, kernels=kernels: list(kernels(case, dry=session.dry)))
        others = [ours.registers(kernel, case, dry=session.dry) for kernel in found or ()]
        times.measure(session, case, [other for other in others if other is not None])


def answers(session: Session) -> None:
    """Compute one figure per question, NaN if a row is missing. A ratio above 1 means that the first is slower."""

    def us(case: str, kernel: str) -> float:
        rows = (row for row in session.rows if row["case"] == case and row["kernel"] == kernel)
        return min((float(row["us"]) for row in rows), default=math.nan)

    def best(case: str) -> float:
        return min((x for kind in ("mma", "wgmma") if (x := us(case, f"mosaic {kind}")) > 0), default=math.nan)

    base = "decode B64 ctx4096"
    wrong = [failed for failed in session.failures if "P in registers" in failed["part"]]
    session.facts["questions"] = {
        "page 16 / page 64": best(f"{base} page16") / best(base),
        "page 128 / page 64": best(f"{base} page128") / best(base),
        "tokens before heads / heads before tokens (one kv head, same bytes)": best(base)
        / best("decode B64 ctx32768 H4K1"),
        "a TMA copy a page / cp.async of jax's Triton kernel, page 64": best(base) / us(base, "jax triton paged"),
        "the same, page 16": best(f"{base} page16") / us(f"{base} page16", "jax triton paged"),
        "mma of 16 rows / wgmma of 64": us(base, "mosaic mma") / us(base, "mosaic wgmma"),
        "verify of 4 tokens / decode of 1": best(f"{base} T4") / best(base),
        "fp8 / bf16": best(f"{base} fp8") / best(base),
        "decode, weights through shared memory / in registers": us(base, "mosaic wgmma")
        / us(base, "mosaic wgmma P in registers"),
        "prefill, weights through shared memory / in registers": us("prefill 8192", "mosaic")
        / us("prefill 8192", "mosaic P in registers"),
        "weights in registers are computed rightly": "not tried" if session.dry else "no" if wrong else "yes",
    }


def _portable() -> tuple[Callable[..., Any], Case]:
    """Return the program that is compiled elsewhere, a decode of a few rows, and its case."""
    case = Case("traveled decode", ((1, 700), (1, 64), (1, 333)))
    kernel = next(iter(ours.decode_kernels(case, dry=False)))

    def program(q: jax.Array, k: jax.Array, v: jax.Array, ragged: Any) -> jax.Array:
        out: jax.Array = kernel.call(q, k, v, ragged, kernel.plan(ragged))[0]
        return out

    return program, case


def build(path: Path) -> None:
    """Compile for an H200 without one, and write the executable to `path`. Run on the machine with the newer ptxas."""
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
    path.write_bytes(pickle.dumps(serialize(lowered.compile())))
    print(f"wrote {path}, compiled by jax {jax.__version__} without a device")


def load(session: Session, path: Path) -> None:
    """Run an executable that `build` made elsewhere, and compare it with the XLA path."""
    from jax.experimental.serialize_executable import deserialize_and_load

    _, case = _portable()
    ragged, pages = case.ragged()
    q, (k, v) = case.queries_of(), case.pool(pages, 1)
    began = time.perf_counter()
    # Safe only for files that `build` wrote: unpickling runs arbitrary code.
    loaded = deserialize_and_load(*pickle.loads(path.read_bytes()))
    seconds = time.perf_counter() - began
    got, want = loaded(q, k, v, ragged), ours.xla(case).call(q, k, v, ragged, ())
    error = float(jnp.linalg.norm((got - want).astype(jnp.float32)) / jnp.linalg.norm(want.astype(jnp.float32)))
    session.facts["traveled executable"] = {"load_s": seconds, "error": error}
    assert error < 8e-3, f"a program compiled elsewhere is wrong here: relative error {error:.2e}"
