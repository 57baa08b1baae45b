"""Configs that were measured to be best, by device. `benchmarks/kernels.py` writes them; nothing here is guessed.

A file `<device>.json` is {"device", "measured", "entries"}: `measured` says when, where and with what, None where no
device was to be had yet; an entry is an op, the values of a spec, and the config that won there. Specs are matched
exactly: a spec that was not measured gets its heuristic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import jax.numpy as jnp

C = TypeVar("C")
KEYS = ("heads", "kv_heads", "dim", "page", "queries", "dtype", "kv_dtype")  # of a spec


def name_of(device: str) -> str:
    """File of a device kind: "NVIDIA H200" and "NVIDIA H200 NVL" are h200."""
    found = re.search(r"\b([A-Z]{1,2}\d+)", device)
    return (found[1] if found else re.sub(r"\W+", "_", device)).lower()


@cache
def entries(device: str) -> tuple[Mapping[str, Any], ...]:
    """What was measured on a device; nothing for one that is unknown."""
    path = resources.files(__name__) / f"{name_of(device)}.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))["entries"]) if path.is_file() else ()


def key_of(spec: Any) -> dict[str, Any]:
    """The values of a kernel's spec that an entry is found by."""
    given = {name: getattr(spec, name) for name in KEYS}
    return {name: jnp.dtype(x).name if name.endswith("dtype") else x for name, x in given.items()}


def best(op: str, spec: Any, device: str, kind: type[C]) -> C | None:
    """The measured config of `op` for a spec, as a `kind`; None where there is none that this jax can run."""
    key = {"op": op, **key_of(spec)}
    for entry in entries(device):
        if all(entry[name] == value for name, value in key.items()):
            known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
            config: Any = kind(**{name: value for name, value in entry["config"].items() if name in known})
            try:
                config.validate(spec)
            except ValueError:
                return None
            return config  # type: ignore[no-any-return]
    return None
