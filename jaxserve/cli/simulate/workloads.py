"""Workloads by name or file: the papers' workloads, presets of configs/workload, and YAML files."""

from __future__ import annotations

import re
from pathlib import Path

from jaxserve.config import preset
from jaxserve.errors import InvalidValue
from jaxserve.sched.sim import NAMED, Mix, Workload
from jaxserve.yamlio import load_yaml, nearest


def find_workload(name: str) -> Workload | Mix:
    """Return the workload named in scenarios.NAMED, a preset, or FILE.yaml.

    A YAML file with `parts` at its top level is a mixture. Raises InvalidValue, with file and line if
    known.
    """
    if name in NAMED:
        return NAMED[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        try:
            path = preset("workload", name)
        except InvalidValue as error:
            hint = nearest(name, NAMED)
            raise InvalidValue(f"{error}; built in: {hint}; or FILE.yaml, or trace:FILE", "workload") from error
    try:
        mixture = re.search(r"(?m)^parts\s*:", path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidValue(f"workload {path} does not exist", "workload") from error
    return load_yaml(path, Mix) if mixture else load_yaml(path, Workload)
