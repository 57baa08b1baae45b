"""All uses of private parts of jax. Each has a fallback, and a test that fails if jax changes."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import pickle
import threading
import weakref
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler
from jax.experimental import serialize_executable

log = logging.getLogger(__name__)

STRIP = "strip_device_assignment"


def backend_started() -> bool:
    """Return whether jax has chosen its devices, so that their number is fixed.

    False if jax does not expose this.
    """
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def share_programs() -> bool:
    """Let instances on different devices share entries of the persistent compilation cache.

    jax leaves the device assignment out of the cache key on GPUs only. Cached programs are loaded for
    the requested devices, so the key does not need it on other platforms either. Returns False, and
    logs a warning, if this jax does not support it; every instance then compiles its own programs.
    """
    try:
        from jax._src import cache_key

        plain = cache_key._hash_serialized_compile_options
    except (ImportError, AttributeError):
        log.warning("this jax has no cache_key hook: every instance compiles its own programs")
        return False
    if getattr(plain, "shares_programs", False):
        return True
    if STRIP not in inspect.signature(plain).parameters:
        log.warning("this jax cannot leave devices out of its cache key: every instance compiles its own programs")
        return False

    @functools.wraps(plain)
    def shared(*args: object, **kwargs: object) -> None:
        plain(*args[:2], **{**kwargs, STRIP: True})  # type: ignore[no-untyped-call]

    shared.shares_programs = True  # type: ignore[attr-defined]
    cache_key._hash_serialized_compile_options = shared
    return True


# Where the names in a kept executable may be from: no other is looked up, and nothing else is called.
TRUSTED = ("jax", "jaxlib", "numpy", "jaxserve", "pallas_kernels")


class _Read(threading.local):
    """What this thread last read from jax's persistent cache."""

    serialized: bytes | None = None


_read = _Read()
# What was read, by executable: jax may return the same one when it compiles the same program again.
_serialized: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


def compile_serialized(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bytes]:
    """Compile a program, or read it from jax's persistent cache; return the executable, also serialized.

    Serialized before it runs: the first call gives an executable parts that no pickle holds. One that
    was itself deserialized loses its functions on a CPU, so what jax's cache holds is taken instead.
    Raises ValueError, AttributeError or PicklingError if this jax or backend cannot.
    """
    if not getattr(compilation_cache.extract_executable_and_time, "notes", False):
        plain = compilation_cache.extract_executable_and_time

        @functools.wraps(plain)
        def noted(data: bytes) -> tuple[bytes, int]:
            found = plain(data)
            _read.serialized = found[0]
            return found

        noted.notes = True  # type: ignore[attr-defined]
        compilation_cache.extract_executable_and_time = noted
    _read.serialized = None
    compiled = lowered.compile()
    executable = compiled._executable
    if _read.serialized is not None:
        _serialized[executable] = _read.serialized
    read, unloaded = _serialized.get(executable), executable._unloaded_executable  # type: ignore[attr-defined]

    class Dumper(serialize_executable._JaxPjrtPickler):
        def persistent_id(self, named: Any) -> Any:
            taken = read is not None and named is unloaded.xla_executable
            return ("exec", read) if taken else super().persistent_id(named)  # type: ignore[no-untyped-call]

    infos = jax.tree.leaves(compiled.args_info)
    with io.BytesIO() as file:
        Dumper(file).dump((unloaded, infos, compiled._no_kwargs))  # type: ignore[attr-defined]
        devices = [device.id for device in unloaded.device_list]
        return compiled, pickle.dumps((file.getvalue(), compiled.out_tree, devices))


def load_executable(data: bytes, args: tuple[Any, ...], devices: tuple[Any, ...]) -> jax.stages.Compiled:
    """Return what `compile_serialized` serialized, for calls with arguments like `args` on `devices`.

    `devices` take the places of those that it was compiled for, in order.
    """
    payload, out, saved = _Names(io.BytesIO(data)).load()
    if len(saved) != len(devices):
        raise ValueError(f"it was compiled for {len(saved)} devices, not for {len(devices)}")

    client, here = devices[0].client, np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(1, len(devices), device_assignment=here, backend=client)

    class Loader(_Names, serialize_executable._JaxPjrtUnpickler):  # type: ignore[misc]
        def persistent_load(self, named: Any) -> Any:
            if named[0] == "exec":  # else it runs on the devices that it was compiled for
                return client.deserialize_executable(named[1], self.execution_devices, options)
            return super().persistent_load(named)

    loader = Loader(io.BytesIO(payload), client, devices)
    loader.devices_by_id = dict(zip(saved, devices, strict=True))
    unloaded, infos, plain = loader.load()
    given = jax.tree.structure((args, {}))
    return jax.stages.Compiled(unloaded.load(), [], given.unflatten(infos), out, no_kwargs=plain)


def results(compiled: jax.stages.Compiled) -> Any:
    """Return the abstract results of an executable."""
    avals = compiled._executable.out_avals  # type: ignore[attr-defined]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    return jax.tree.unflatten(compiled.out_tree, shapes)


class _Names(pickle.Unpickler):
    """Resolves names of trusted packages only."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in TRUSTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
