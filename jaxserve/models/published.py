"""Configs of published models: from the bundled table, from a folder, or from the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import preset
from jaxserve.models.hub import fetch_config
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.yamlio import load_yaml, nearest

if TYPE_CHECKING:
    from jaxserve.models.context_length import Config
    from jaxserve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Published:
    """An entry of configs/model/published.yaml."""

    hub: str
    config: Any  # a mapping, as in config.json
    parameters: int | None = None  # as counted by the repository's safetensors index


@dataclass(frozen=True, slots=True)
class _Table:
    models: Mapping[str, Published]
    families: Any = None  # YAML anchors that the configs share


@cache
def published() -> Mapping[str, Published]:
    """Return the table by short name."""
    return load_yaml(preset("model", "published"), _Table).models


def short_name(name: str) -> str | None:
    """Return `name` in lower case if it is a short name of the table; None if it is not, or is a folder."""
    if Path(name).expanduser().is_dir():
        return None
    return name.lower() if name.lower() in published() else None


def repository_of(name: str) -> str:
    """Return the Hub repository of a short name; any other name unchanged."""
    short = short_name(name)
    return name if short is None else published()[short].hub


def published_spec(name: str) -> ModelSpec:
    """Return the spec of a model of the table. Raises InvalidValue that names similar models."""
    from jaxserve.models import registry  # imported late: it imports jax

    if name not in published():
        raise InvalidValue(f"no published model {name!r}; {nearest(name, published())}", "model")
    return registry.spec_from_config(published()[name].config)


def find_config(name: str) -> tuple[Config, str]:
    """Return the config of a model and a description of its source: a folder, the table, or the Hub.

    Models of the table are found by short name or Hub id. Raises InvalidValue or ModelNotFound that
    names the model and what is allowed.
    """
    from jaxserve.models import registry  # imported late: it imports jax

    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return registry.read_config(folder), f"{folder}/config.json"
    hubs = {entry.hub.lower(): short for short, entry in published().items()}
    short = hubs.get(name.lower(), name.lower())
    if short in published():
        return published()[short].config, f"the table of published models ({published()[short].hub})"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise InvalidValue(
            f"model {name!r} is neither a folder with a config.json, nor a Hugging Face Hub id such as Qwen/Qwen3-8B, "
            f"nor one of {', '.join(published())}",
            "model",
        )
    return registry.read_config(fetch_config(name)), f"config.json of {name} on the Hub"
