"""Executables as bytes, and back on other devices. Uses private parts of jax; tests fail if these change."""

from __future__ import annotations

import functools
import io
import pickle
import threading
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler
from jax._src.interpreters import pxla
from jax.experimental import serialize_executable

PICKLER: Any = serialize_executable._JaxPjrtPickler
UNPICKLER: Any = serialize_executable._JaxPjrtUnpickler
# Where the names in a kept executable may be from: no other is looked up, and nothing else is called.
TRUSTED = ("jax", "jaxlib", "numpy", "ml_dtypes", "jaxserve", "pallas_kernels")


class _Read(threading.local):
    """What this thread last read from jax's persistent cache."""

    serialized: bytes | None = None

    def taken(self) -> bytes | None:
        """Return what was read since the last call."""
        taken, self.serialized = self.serialized, None
        return taken


_read = _Read()


def compile_serialized(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None = None
) -> tuple[jax.stages.Compiled, bytes]:
    """Compile a program, or read it from jax's persistent cache; return the executable, also serialized.

    options: of the compiler.

    Serialized before it runs: the first call gives an executable parts that no pickle holds. One that
    was itself deserialized loses its functions on a CPU, so what jax's cache holds is taken instead.
    Raises ValueError, AttributeError, TypeError or PicklingError if this jax or backend cannot.
    """
    _note_reads()
    _read.taken()
    pxla.clear_in_memory_compilation_cache()  # what it has may have been read, and what was read is not told again
    compiled = lowered.compile(options or {})
    unloaded: Any = compiled._executable._unloaded_executable  # type: ignore[attr-defined]
    read = _read.taken()

    class Dumper(PICKLER):
        def persistent_id(self, named: Any) -> Any:
            return ("exec", read) if read and named is unloaded.xla_executable else super().persistent_id(named)

    plain = compiled._no_kwargs
    with io.BytesIO() as file:
        Dumper(file).dump((unloaded, jax.tree.leaves(compiled.args_info), plain))
        devices = [device.id for device in unloaded.device_list]
        return compiled, pickle.dumps((file.getvalue(), compiled.out_tree, devices))


def _note_reads() -> None:
    """Let `_read` see what jax reads from its persistent cache, once per process."""
    cache: Any = compilation_cache
    plain = cache.extract_executable_and_time
    if getattr(plain, "notes", False):
        return

    @functools.wraps(plain)
    def noted(data: bytes) -> Any:
        value = plain(data)
        _read.serialized = value[0]
        return value

    noted.notes = True  # type: ignore[attr-defined]
    cache.extract_executable_and_time = noted


def load_executable(data: bytes, args: tuple[Any, ...], devices: tuple[Any, ...]) -> jax.stages.Compiled:
    """Return what `compile_serialized` serialized, for calls with arguments like `args` on `devices`.

    `devices` take the places of those that it was compiled for, in order.
    """
    payload, out, saved = _Names(io.BytesIO(data)).load()
    if len(saved) != len(devices):
        raise ValueError(f"it was compiled for {len(saved)} devices, not for {len(devices)}")

    client, here = devices[0].client, np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(1, len(devices), device_assignment=here, backend=client)

    class Loader(_Names, UNPICKLER):
        def persistent_load(self, named: Any) -> Any:
            if named[0] == "exec":  # else it runs on the devices that it was compiled for
                return client.deserialize_executable(named[1], self.execution_devices, options)
            return super().persistent_load(named)

    make: Any = Loader
    loader = make(io.BytesIO(payload), client, devices)
    loader.devices_by_id = dict(zip(saved, devices, strict=True))
    unloaded, infos, plain = loader.load()
    given: Any = jax.tree.structure((args, {}))
    return jax.stages.Compiled(unloaded.load(), [], given.unflatten(infos), out, no_kwargs=plain)


def results(compiled: jax.stages.Compiled) -> Any:
    """Return the abstract results of an executable."""
    executable: Any = compiled._executable
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in executable.out_avals]
    return jax.tree.unflatten(compiled.out_tree, shapes)


class _Names(pickle.Unpickler):
    """Resolves names of trusted packages only."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in TRUSTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
