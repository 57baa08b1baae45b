"""Every kernel against float64 on the device: the cases of tests/gpu/test_numerics.py, those that engines choose first.

A case is compiled before its process takes the device's lock. A wrong case is a row with the error; one that aborts or
hangs ends its process, which begins again behind it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax

from benchmarks.common import ROOT

from . import probe
from .device import Device, limited
from .part import GOOD, Run, Skip, slug
from .timing import interpreter_or_none, needs_mosaic

COMPILED, RAN = 60.0, 15.0  # seconds after which compiling or running a case counts as hanging
HANGS = 3  # cases of a family that kill their process before the rest of the family is left out
DUMP = "MOSAIC_GPU_DUMP_TO"
FAMILIES = (
    "decode", "prefill", "decode_8bit", "prefill_8bit", "shared_prefixes", "mla", "grouped_matmul", "quantized_matmul",
    "gated_matmul", "kv_write", "kv_pages", "sampling",
)  # fmt: skip
QUICK = ("decode", "grouped_matmul", "gated_matmul", "kv_write", "kv_pages", "sampling")  # in the interpreter
WITHOUT_MOSAIC = ("kv_pages",)
# What an engine chooses by default for served models.
FIRST = re.compile(
    r"(decode|prefill): dim \d+, page 64|(decode|prefill): dim 128, page 16|decode: (drafts|16 query heads each|"
    r"a window|a soft cap|sinks and a window|served|served in a mixed step|foreign values)|prefill: (a window|"
    r"a soft cap|sinks and a window|served|nothing but decode rows|foreign values)|decode_8bit: (served .*|"
    r".*fn, drafts|foreign .*fn)|prefill_8bit: served .*|mla: (16 heads, page 64|prompts|128 heads|served|"
    r"float8_e4m3fn, page 64)|"
    r"grouped_matmul: served (\d+|64 float8_e4m3fn)|gated_matmul: served 64|quantized_matmul: served|kv_write: "
    r".*bfloat16 as (bfloat16|float8_e4m3fn)|kv_pages: .*bfloat16|sampling: (normal, 32000|served .*)|"
    r"shared_prefixes: served"
)


def all_cases() -> dict[str, Callable[[], Any]]:
    """Return the check of each case by its name, "family: case"; the most important ones first."""
    from tests.gpu import test_numerics

    found = {
        f"{family}: {name}": check for family in FAMILIES for name, check in test_numerics.FAMILIES[family].items()
    }
    return dict(sorted(found.items(), key=lambda item: not FIRST.fullmatch(item[0])))


def check(run: Run) -> None:
    """Check the cases that no other part has claimed; in a dry run, one of each family that is soon interpreted."""
    os.nice(5)
    chosen = all_cases()
    if run.dry:
        chosen = {name: chosen[name] for name in map(_first, QUICK)}
    _check(run, chosen, claim=True)


def again(run: Run) -> None:
    """Check once more what was not right, one case at a time: is it the case, or its neighbors?"""
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    known = all_cases()
    bad = [item for item, row in run.items().items() if item in known and row["outcome"] not in GOOD]
    if not bad:
        raise Skip("every case that ran was right")
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache writes no dump
    _check(run, {f"{item}, again": partial(_dumped, run, item, known[item]) for item in bad}, claim=False)


def _first(family: str) -> str:
    """Return the name of the first case of a family as it is written, which is small enough for the interpreter."""
    from tests.gpu import test_numerics

    return f"{family}: {next(iter(test_numerics.FAMILIES[family]))}"


def _check(run: Run, cases: Mapping[str, Callable[[], Any]], *, claim: bool) -> None:
    interpreter_or_none(run.dry)
    work = {item: partial(_case, run, item, call) for item, call in cases.items()}
    with compiled_first(Device(run.scratch), dry=run.dry):
        run.each(work, claim)


def _case(run: Run, item: str, check: Callable[[], Any]) -> None:
    family = item.partition(":")[0]
    if family not in WITHOUT_MOSAIC:
        needs_mosaic(run)
    killed = [one for one, row in run.items().items() if row["outcome"] == "killed" and one.startswith(f"{family}:")]
    if len(killed) >= HANGS:
        raise Skip(f"{len(killed)} cases of {family} ended their process")
    from _pytest.outcomes import Skipped

    try:
        check()
    except Skipped as why:
        raise Skip(str(why)) from None


def _dumped(run: Run, item: str, check: Callable[[], Any]) -> None:
    """Check a case, and keep its PTX and the compiler's report if it is not right."""
    folder = run.scratch / "dumped" / slug(item)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[DUMP] = str(folder)
    try:
        check()
    except Exception:
        keep = run.folder / "failed" / slug(item)
        keep.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.ptx"), *folder.glob("*.ptxas")):
            shutil.copy(path, keep)
        raise
    finally:
        os.environ.pop(DUMP)
        shutil.rmtree(folder)


@contextmanager
def compiled_first(device: Device, *, dry: bool) -> Iterator[None]:
    """Let programs of `jax.jit` compile outside of the device's lock, and run inside of it."""
    real = jax.jit

    def jit(fun: Any = None, **options: Any) -> Any:
        if fun is None:
            return partial(jit, **options)
        return _CompiledFirst(real(fun, **options), device, 100 if dry else 1)

    with mock.patch.object(jax, "jit", jit):
        yield


class _CompiledFirst:
    """A jitted function that compiles, then runs under the device's lock; everything else is the function's."""

    inside = False  # the interpreter of a dry run calls programs inside of programs, in other threads too

    def __init__(self, made: Any, device: Device, slack: int) -> None:
        self._made, self._device, self._slack = made, device, slack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, named)))
        if traced or _CompiledFirst.inside or threading.current_thread() is not threading.main_thread():
            return self._made(*args, **named)
        with limited(self._slack * COMPILED):
            self._made.lower(*args, **named).compile()  # the call finds it
        _CompiledFirst.inside = True
        try:
            with self._device.shared(self._slack * RAN):
                return jax.block_until_ready(self._made(*args, **named))
        finally:
            _CompiledFirst.inside = False


def law(run: Run, model: str) -> None:
    """Check that no schedule changes the tokens that come through the compiled kernels, and that nothing compiles."""
    if run.dry:
        from tests.support.parity import wide
        from tests.support.parity.asks import asks

        wide.hold(wide.model(model), asks(1, 2), "xla", "1x1")
        return
    needs_mosaic(run)
    from tests.gpu.test_law import check as hold

    hold(model)


def memcheck(run: Run, item: str) -> None:
    """Run a case under compute-sanitizer, which finds accesses beyond a buffer."""
    tool = probe.sanitizer()
    if tool is None:
        raise Skip("compute-sanitizer is not installed")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--kernel-regex", "kns=mosaic"]
    done = subprocess.run(
        [*command, sys.executable, "-m", f"{__package__}.cases", item], cwd=ROOT, env=dict(os.environ),
        capture_output=True, text=True, check=False, timeout=run.left() - 5,
    )  # fmt: skip
    said = done.stdout + done.stderr
    print(said)
    summary = (re.findall(r"=+ (ERROR SUMMARY: .*|.*nsupported.*|.*[Uu]nable.*)", said) or ["no summary"])[-1]
    run.row("memcheck", case=item, status=done.returncode, summary=summary)
    if "ERROR SUMMARY" not in summary:
        raise Skip(f"compute-sanitizer does not work here: {summary}")
    assert done.returncode == 0, summary


if __name__ == "__main__":
    all_cases()[sys.argv[1]]()
