"""What compiles: a counter of programs, and the folder where compiled ones are kept."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax

from jaxserve.cache_folder import cache_folder
from jaxserve.engine.programs import compat

log = logging.getLogger(__name__)

TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"
LOAD = "/jax/compilation_cache/cache_hits"
FRAMES = "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"


class CompileCounter:
    """Counts the programs that jax traces and compiles, and those that it loads from the persistent cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = self._loaded = self._warm = 0
        self._later = threading.local()  # `on`: whether this thread makes programs that no step waits for
        self.traces_total = self.later_total = 0
        self.writable = True  # whether the persistent cache stores programs; set by `use_persistent_cache`
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        with self._lock:
            if event == TRACE:
                self.traces_total += 1
            elif event == COMPILE:  # jax reports it for loaded programs too
                self._made += 1
                self.later_total += getattr(self._later, "on", False)

    def _on_event(self, event: str, **_: str | int) -> None:
        if event == LOAD:
            with self._lock:
                self._loaded += 1

    @property
    def compilations_total(self) -> int:
        return self._made - self._loaded

    @property
    def cache_loads_total(self) -> int:
        return self._loaded

    @property
    def unkept_total(self) -> int:
        """Compiled programs that the next start compiles again, because the cache folder is not writable."""
        return 0 if self.writable else self.compilations_total

    @property
    def after_warmup(self) -> int:
        """Programs compiled or loaded since `warm`, other than in `later`; each delayed a step."""
        return self._made - self.later_total - self._warm

    def warm(self) -> None:
        """Mark the end of warm-up."""
        self._warm = self._made - self.later_total

    @contextmanager
    def later(self) -> Iterator[None]:
        """Count what this thread makes meanwhile as programs that no step waits for."""
        self._later.on = True
        try:
            yield
        finally:
            self._later.on = False


@cache
def compile_counter() -> CompileCounter:
    """Return the counter of this process: a single one, because jax never removes a listener."""
    return CompileCounter()


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder cannot be written, or None; a missing folder is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror or error})"


def use_persistent_cache(folder: Path | None = None) -> Path:
    """Keep compiled programs between runs and share them among instances.

    folder: None: see `cache_folder`.
    """
    path = folder or cache_folder()
    counter, reason = compile_counter(), why_not_writable(path)
    if reason is not None and counter.writable:
        log.warning("compiled programs and profiles are not stored: %s; set JAXSERVE_CACHE_DIR", reason)
        warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")  # one per program
    counter.writable = reason is None
    jax.config.update("jax_compilation_cache_dir", str(path))  # also if it can only be read
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if FRAMES not in os.environ:  # call stacks of operations are a fifth of the time that loading a program takes
        jax.config.update(FRAMES.lower(), 0)
    compat.share_programs()
    return path
