"""The differences in Pallas for Hopper between jax 0.10.2 and 0.12, in one place. Importing it touches no device.

jax renames, deprecates and adds to `pallas.mosaic_gpu` with every release. Kernels import these
names instead:

| name          | 0.10.2                         | 0.11 and later                    |
|---------------|--------------------------------|-----------------------------------|
| `kernel`      | semantics must be requested    | Warpgroup semantics by default    |
| `in_place`    | `mpmd_map` with aliases        | `kernel` takes `jax.new_ref`      |
| `load`        | index is a positional argument | index is part of the ref          |
| `transpose`   | `transpose_ref`                | `ref.T`; the former is deprecated |
| `HAS_MMA`     | no warp-level mma              | `plgpu.mma`                       |
| interpreter   | private, no race detection     | public, detects races             |

`plgpu` here is jax's module as `Any`, because its types differ between versions too; kernels import
it from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as _plgpu

from pallas_kernels import ptxas

ptxas.prefer()  # before any kernel compiles
plgpu: Any = _plgpu

VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
HAS_MMA = hasattr(plgpu, "mma")
DETECTS_RACES = hasattr(plgpu, "InterpretGPUParams")  # this interpreter also has wgmma, layouts and transposed refs


def kernel(
    body: Callable[..., None],
    *,
    out: Any,
    scratch: Any,
    grid: Sequence[tuple[str, int]],
    threads: tuple[str, int],
    interpret: Any = None,
    fast_math: bool = True,
) -> Callable[..., Any]:
    """Return `plgpu.kernel` over named grid axes.

    `threads` is (name, count) of warpgroups; `interpret` is described in interpret.py.
    """
    options: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    run: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=scratch,
        grid=tuple(size for _, size in grid),
        grid_names=tuple(name for name, _ in grid),
        num_threads=threads[1],
        thread_name=threads[0],
        compiler_params=plgpu.CompilerParams(
            approx_math=fast_math, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        **options,
    )
    return run


def in_place(
    body: Callable[..., None],
    *,
    created: Sequence[Any] = (),
    changed: Sequence[jax.Array],
    read: Sequence[jax.Array],
    grid: Sequence[tuple[str, int]],
    name: str,
    interpret: Any = None,
    fast_math: bool = False,
) -> tuple[jax.Array, ...]:
    """Run a body on one warpgroup per block; return the new arrays `created` and those of `changed`.

    The body gets the refs (*created, *changed, *read). If the arrays of `changed` are donated, or not
    used elsewhere, they are updated in place and nothing is copied.
    """
    axes: dict[str, Any] = {
        "grid": tuple(size for _, size in grid),
        "grid_names": tuple(axis for axis, _ in grid),
        "num_threads": 1,
        "thread_name": "warpgroup",
        "kernel_name": name,
    }
    params = plgpu.CompilerParams(approx_math=fast_math, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    options: dict[str, Any] = {"compiler_params": params, **({} if interpret is None else {"interpret": interpret})}
    count = len(changed)
    if VERSION < (0, 11):  # `kernel` takes no refs before 0.11
        from jax._src.pallas.mpmd import _mpmd_map

        def aliased(*refs: Any) -> None:
            given, after = refs[: count + len(read)], refs[count + len(read) :]
            body(*after, *given[count:])

        out = (*created, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed))
        aliases = {i: i + len(created) for i in range(count)}
        run = _mpmd_map([(plgpu.Mesh(**axes), aliased)], out, input_output_aliases=aliases, name=name, **options)
        done: tuple[jax.Array, ...] = run(*changed, *read)
        return done

    def ordered(*refs: Any) -> None:
        given = len(refs) - len(created)
        body(*refs[given:], *refs[:given])

    refs = [jax.new_ref(array) for array in changed]
    new = plgpu.kernel(ordered, out_type=tuple(created), **axes, **options)(*refs, *read)
    return (*new, *(jax.freeze(ref) for ref in refs))


def load(ref: Any, layout: Any = None, *, optimized: bool = True) -> jax.Array:
    """Read all of `ref` (index it with `.at` first) into registers of `layout`."""
    if VERSION < (0, 11):
        early: jax.Array = plgpu.load(ref, (), layout=layout, optimized=optimized)
        return early
    loaded: jax.Array = plgpu.load(ref, layout=layout, optimized=optimized)
    return loaded


def copy_row(source: Any, target: Any, barrier: Any) -> None:
    """Start a copy of part of a row from GMEM to SMEM, in size and offsets a multiple of 16 bytes.

    The part must be in bounds: a bounds-checked copy is a tiled one, limited to 256 elements per
    dimension.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def transpose(ref: Any) -> Any:
    """Return a rank-2 ref with its axes swapped; no data moves."""
    return plgpu.transpose_ref(ref, (1, 0)) if VERSION < (0, 11) else ref.T


def interpreter_params(detect_races: bool) -> Any:
    """Return the `plgpu.kernel(interpret=)` value that runs kernels on the host, with threads, barriers and TMA."""
    if DETECTS_RACES:
        return plgpu.InterpretGPUParams(detect_races=detect_races)
    if detect_races:
        raise NotImplementedError(f"race detection needs jax 0.11 or later; this is {jax.__version__}")
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams(num_tma_threads_per_device=5)


@contextmanager
def watched_kernels(*, in_order: bool = False) -> Iterator[list[Any]]:
    """Collect the interpreter's race-detection state of every kernel run inside.

    jax itself keeps only the last kernel's state, and most operations here run two kernels or more.
    `in_order`: a block's accesses come after those of the blocks that ran before it. Otherwise the
    interpreter starts their clocks anew, and any two blocks may race.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

    callbacks: Any = gpu_callbacks  # as Any: its types differ between versions
    memory: Any = shared_memory.GPUSharedMemory
    original, notes, reset = callbacks.GPURaceDetectionState, [], memory.reset_per_cluster_state

    def later(self: Any) -> None:
        before = getattr(self, "clocks", {}).values()
        reset(self)
        for clock in self.clocks.values():
            for one in before:
                clock.update(one)

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(original(*args, **kwargs))
        return notes[-1]

    callbacks.GPURaceDetectionState = noted
    if in_order:
        memory.reset_per_cluster_state = later
    try:
        yield notes
    finally:
        callbacks.GPURaceDetectionState = original
        memory.reset_per_cluster_state = reset


def reset_interpreter() -> None:
    """Reset the interpreter's threads and buffers after an exception inside an interpreted kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()
