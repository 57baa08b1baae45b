"""Checks before any timing: correctness of the device, its bandwidth and FLOP ceilings, correctness of the kernels."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import ours
from .cases import Case, numeric_cases
from .ours import Kernel
from .session import Session, normal

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """Return device, driver and compilers: another ptxas may give other figures."""
    device = jax.devices()[0]
    facts = {
        "device": device.device_kind,
        "platform": jax.default_backend(),
        "platform_version": jax.extend.backend.get_backend().platform_version if hasattr(jax, "extend") else "",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "ptxas": _first_line("ptxas", "--version", last=True),
    }
    asked = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    facts["nvidia_smi"] = _first_line("nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader")
    return facts


def _first_line(*command: str, last: bool = False) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    lines = done.stdout.strip().splitlines() or [""]
    return lines[-1 if last else 0]


def sanity(session: Session) -> None:
    """Compare eager and jitted programs with numpy. Raises AssertionError if they differ."""
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal((256, 256), np.float32) for _ in range(2))
    index = draw.integers(0, 256, 97)
    checks: dict[str, tuple[Any, Any, float]] = {
        "product": (lambda x, y: jnp.matmul(x, y, precision="highest"), a @ b, 1e-4),
        "product bf16": (lambda x, y: jnp.matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)), a @ b, 2e-2),
        "softmax": (lambda x, y: jax.nn.softmax(x * y), _softmax(a * b), 1e-5),
        "gather": (lambda x, y: x[index] + y[:97], a[index] + b[:97], 1e-6),
        "scatter": (lambda x, y: x.at[index].set(y[0]), _scattered(a, b, index), 0.0),
        "cumsum": (lambda x, y: jnp.cumsum(x + y, axis=0), np.cumsum(a + b, axis=0, dtype=np.float64), 1e-5),
    }
    for name, (program, want, most) in checks.items():
        for how, run in (("eager", program), ("jit", jax.jit(program))):
            got = np.asarray(run(jnp.asarray(a), jnp.asarray(b)).astype(jnp.float32))
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            assert error <= most, f"{how} {name} is wrong: relative error {error:.2e}, at most {most:.0e}"
    session.facts["sanity"] = "eager and jit agree with numpy"


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _scattered(a: np.ndarray, b: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = a.copy()
    out[index] = b[0]
    return out


def _rounds(session: Session, loop: Any, x: Any, per: int) -> float:
    """Return the seconds of one of the `per` rounds of a loop that donates and returns its arrays."""
    x = jax.block_until_ready(loop(x))
    times = []
    for _ in range(2 if session.dry else 20):
        began = time.perf_counter()
        x = jax.block_until_ready(loop(x))
        times.append(time.perf_counter() - began)
    return median(times) / per


def copy_ceiling(session: Session) -> None:
    """Measure the copy bandwidth: read and write four arrays of 512 MiB in turn, in place."""
    size, per = (1 << 16, 2) if session.dry else (1 << 28, 20)
    arrays = [normal((size,), jnp.bfloat16, i) for i in range(4)]

    def rounds(arrays: list[jax.Array]) -> list[jax.Array]:
        return lax.fori_loop(0, per, lambda _, all_: [x + jnp.bfloat16(1) for x in all_], arrays)

    took = _rounds(session, jax.jit(rounds, donate_argnums=0), arrays, 4 * per)
    moved = 2.0 * size * 2
    session.ceilings.copy = moved / took
    session.add("ceiling", "copy", [took, took], moved=moved)


def matmul_ceiling(session: Session) -> None:
    """Measure the FLOP rate of bfloat16 matmuls of 8192 x 8192."""
    size, per = (128, 2) if session.dry else (8192, 20)
    weight = normal((size, size), jnp.bfloat16, 1) * jnp.bfloat16(size**-0.5)

    def rounds(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, per, lambda _, x: x @ weight, x)

    took = _rounds(session, jax.jit(rounds, donate_argnums=0), normal((size, size), jnp.bfloat16, 2), per)
    flops = 2.0 * size**3
    session.ceilings.matmul = flops / took
    session.add("ceiling", "matmul", [took, took], moved=3.0 * 2 * size**2, flops=flops)


def reference() -> Any:
    """Load the float64 reference that the kernel tests use."""
    path = ROOT / "tests" / "support" / "kernels" / "reference.py"
    spec = importlib.util.spec_from_file_location("kernel_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def numerics(session: Session, case: Case, kernels: Any) -> None:
    """Check each kernel on random data; an error above what rounding explains fails that kernel's part."""
    ragged, pages = case.ragged()
    q, (k, v) = case.queries_of(), case.pool(pages, 1)
    formula = reference()
    want, _ = formula.attention(q, k, v, ragged, scale=case.scale)
    most = 2e-3 if case.dtype == jnp.float16 else 8e-3
    for kernel in kernels:
        session.part(f"{case.name}: {kernel.label}", lambda kernel=kernel: _hold(session, case, kernel, want, most))


def _hold(session: Session, case: Case, kernel: Kernel, want: Any, most: float) -> None:
    ragged, pages = case.ragged()
    q, (k, v) = case.queries_of(), case.pool(pages, 1)
    got = jax.jit(lambda *args: kernel.call(*args, kernel.plan(args[3])))(q, k, v, ragged)
    out = got[0] if isinstance(got, tuple) else got
    error = reference().error(out, want)
    session.rows.append({"case": case.name, "kernel": kernel.label, "us": math.nan, "error": error})
    assert error <= most, f"relative error {error:.2e} is more than {most:.0e}"


def all_numerics(session: Session) -> None:
    """Check every kernel on random data."""
    dry = session.dry
    for case in numeric_cases(dry, decode=True):
        session.part(case.name, lambda case=case: numerics(session, case, [ours.xla(case)]))
        session.part(
            case.name, lambda case=case: numerics(session, case, _with_registers(ours.decode_kernels, case, dry))
        )
    for case in numeric_cases(dry, decode=False):
        session.part(case.name, lambda case=case: numerics(session, case, [ours.xla(case)]))
        session.part(
            case.name, lambda case=case: numerics(session, case, _with_registers(ours.prefill_kernels, case, dry))
        )


def _with_registers(kernels: Any, case: Case, dry: bool) -> list[Kernel]:
    """Return the kernels and, on a device, their variants with weights in registers, which some ptxas miscompile."""
    found = list(kernels(case, dry=dry))
    return found if dry else found + [one for k in found if (one := ours.registers(k, case, dry=dry)) is not None]
