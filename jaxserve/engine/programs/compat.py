"""All uses of private parts of jax. Each has a fallback, and a test that fails if jax changes."""

from __future__ import annotations

import functools
import inspect
import logging

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
