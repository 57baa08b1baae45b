"""Traces of the device and the host by jax.profiler, on request while the engine serves."""

from __future__ import annotations

import threading
from pathlib import Path

from jaxserve.errors import InvalidValue, JaxserveError


class Profiler:
    """The profiler of a process. `start` and `stop` may be called from any thread."""

    def __init__(self, folder: str | None) -> None:
        """folder: `profile_dir`; None: no profile may be taken."""
        self._folder = folder
        self._lock = threading.Lock()
        self._running = False

    def set(self, on: bool) -> bool:
        """Start or end a trace, which `stop` writes below the folder, and return True.

        Raises InvalidValue without a folder and for a second start or stop, JaxserveError if jax cannot.
        """
        import jax

        if self._folder is None:
            raise InvalidValue("profiles are off: set profile_dir (--profile-dir)", "profile_dir")
        with self._lock:
            if on is self._running:
                state = "a profile is being taken already" if on else "no profile is being taken"
                raise InvalidValue(f"{state}: POST /{'stop' if on else 'start'}_profile first", "profile")
            try:
                if on:
                    Path(self._folder).mkdir(parents=True, exist_ok=True)
                    jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
                else:
                    self._running = False
                    jax.profiler.stop_trace()
            except (OSError, RuntimeError, ValueError) as error:
                _forget()
                raise JaxserveError(f"the profile in {self._folder!r} failed: {error}") from error
            self._running = on
        return True


def _forget() -> None:
    """Let jax forget a trace that it cannot write, for example to a full disk: it would refuse all others."""
    from jax._src.profiler import _profile_state  # jax has no public way

    with _profile_state.lock:
        _profile_state.reset()
