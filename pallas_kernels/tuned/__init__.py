"""Measured best kernel configs, per device, written by the sweep of `benchmarks.gpu_day`.

A file `<device>.json` is {"device", "measured", "entries"}. `measured` says when, where and with
which versions, or is null if nothing was measured yet. An entry holds an op, the values of a spec
and the config that won. Specs match exactly; a spec without an entry gets the kernel's heuristic
config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any, TypeVar

import jax.numpy as jnp

from pallas_kernels.choice import Here

C = TypeVar("C")
# the attributes of a spec that identify an entry
KEYS = ("heads", "kv_heads", "dim", "page", "queries", "dtype", "kv_dtype")


def name_of(device: str) -> str:
    """Return the file name of a device kind: "NVIDIA H200" and "NVIDIA H200 NVL" give h200."""
    match = re.search(r"\b([A-Z]{1,2}\d+)", device)
    return (match[1] if match else re.sub(r"\W+", "_", device)).lower()


@cache
def entries(device: str) -> tuple[Mapping[str, Any], ...]:
    """Return the entries measured on a device; empty for an unknown device."""
    path = resources.files(__name__) / f"{name_of(device)}.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))["entries"]) if path.is_file() else ()


def key_of(spec: Any) -> dict[str, Any]:
    """Return the values of a kernel's spec that identify an entry."""
    given = {name: getattr(spec, name) for name in KEYS}
    return {name: jnp.dtype(x).name if name.endswith("dtype") else x for name, x in given.items()}


def unreachable(found: Iterable[Mapping[str, Any]], specs: Iterable[tuple[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries that none of `specs`, the (op, spec) that are looked up, would find."""
    keys = [{"op": op, **key_of(spec)} for op, spec in specs]
    return [entry for entry in found if not any(all(entry[n] == x for n, x in key.items()) for key in keys)]


def chosen(op: str, kernel: ModuleType, shape: Any, here: Here) -> Any:
    """Return the config measured on this device for the shape, or else the kernel's heuristic config."""
    measured = None if here.interpret else best(op, shape, here.device, kernel.Config)
    return measured or kernel.heuristic(shape)


def best(op: str, spec: Any, device: str, kind: type[C]) -> C | None:
    """Return the measured config of `op` for `spec` as a `kind`, or None if there is none that this jax can run."""
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
