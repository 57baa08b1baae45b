"""The entries of `/v1/models`, which are the same before and after the engine is ready."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import ServeConfig
from jaxserve.errors import short
from jaxserve.models.context_length import context_length
from jaxserve.models.json_file import object_in
from jaxserve.models.published import published, short_name
from jaxserve.server.failures import Refused

UNKNOWN_MODEL = "model_not_found"


def check_model(config: ServeConfig, name: str | None) -> None:
    """Raise Refused (404) for a model that is not served. No name, or an empty one, is any model."""
    if name and name not in config.names and name != config.model:
        known = ", ".join(map(repr, config.names))
        raise Refused(404, f"model {short(name)} is not served here; served: {known}", "model", UNKNOWN_MODEL)


def present_model(
    config: ServeConfig,
    name: str,
    max_model_len: int | None,
    created: int,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entry of a model. max_model_len: None: not known yet. sampling: of requests that set none."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxserve",
        "root": config.names[0],
        "parent": None,
        "max_model_len": max_model_len,
        **({"default_sampling_params": dict(sampling)} if sampling else {}),
    }


def present_models(
    config: ServeConfig, max_model_len: int | None, created: int, sampling: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the response to `GET /v1/models`."""
    data = [present_model(config, name, max_model_len, created, sampling) for name in config.names]
    return {"object": "list", "data": data}


def expected_length(config: ServeConfig) -> int | None:
    """Return the longest prompt plus output before the engine knows it; None if config.json does not say so.

    Imports neither jax nor transformers, and uses no network.
    """
    if config.max_model_len is not None:
        return config.max_model_len
    try:
        given = _given(config.model_source)
        return context_length(given) if given.get("max_position_embeddings") else None
    except (ValueError, TypeError, AttributeError, ArithmeticError):
        return None  # the engine reports what is wrong with it


def _given(model: str) -> dict[str, Any]:
    """Return the config.json of a model that is in a folder or the table of published models, else {}."""
    if (name := short_name(model)) is not None:
        return dict(published()[name].config)
    path = Path(model).expanduser() / "config.json"
    return object_in(path) if path.is_file() else {}
