"""Settings of an engine whose model keeps a state per request: see `models/cache.py`."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxserve.config import ServeConfig
from jaxserve.engine.memory import kv
from jaxserve.errors import InvalidValue
from jaxserve.models.spec import ModelSpec

STATEFUL = "layers of this model keep a state per request (docs/guide/models.md)"


def fitting(config: ServeConfig, spec: ModelSpec) -> ServeConfig:
    """Return the settings for a model: without prefix caching if layers keep a state per request.

    Raises InvalidValue for other settings that such a model does not support.
    """
    if spec.cache.state is None:
        return config
    for name, given in (("speculative_config", config.speculative_config), ("kv_disk", config.kv_disk)):
        if given is not None:
            raise InvalidValue(f"{name}={given!r} must be left out: {STATEFUL}", name)
    if kv.scaled(config.kv_cache_dtype):
        what = f"kv_cache_dtype={config.kv_cache_dtype!r} must have 16 or 32 bits"
        raise InvalidValue(f"{what}: {STATEFUL}", "kv_cache_dtype")
    if jax.process_count() > 1:
        raise InvalidValue(f"mesh={config.mesh!r} must be of one host: {STATEFUL}", "mesh")
    try:
        return replace(config, enable_prefix_caching=False)  # raises for what puts KV into the prefix cache
    except InvalidValue as error:
        raise InvalidValue(f"{STATEFUL}, so there is no prefix cache; {error}", error.param) from error
