"""The recorded bounds in `bounds.json`, by target, then by minor version of jax, then by case."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pallas_kernels.gate.rules import Bound

FILE = Path(__file__).with_name("bounds.json")
Bounds = dict[str, Bound]  # by case


def load(target: str, jax: str, file: Path = FILE) -> tuple[Bounds, str]:
    """Return the bounds for the minor version of `jax`, and the version they were recorded under.

    That is the newest recorded version not above `jax`; ({}, "") if there is none.
    """
    recorded = _read(file).get(target, {})
    versions = sorted((_number(version), version) for version in recorded)
    known = [version for number, version in versions if number <= _number(minor(jax))]
    if not known:
        return {}, ""
    return {case: Bound(**bound) for case, bound in recorded[known[-1]].items()}, known[-1]


def record(target: str, jax: str, found: Mapping[str, Bound], file: Path = FILE, *, whole: bool = False) -> None:
    """Write `found` over the recorded bounds; cases not in it keep theirs, unless it is the `whole` set."""
    everything = _read(file)
    versions = everything.setdefault(target, {})
    kept = {} if whole else versions.get(minor(jax), {})
    versions[minor(jax)] = {**kept, **{case: asdict(bound) for case, bound in found.items()}}
    text = json.dumps(everything, indent=1, sort_keys=True)
    # One case per line, so that changing one is a one-line diff.
    file.write_text(re.sub(r"\{[^{}]*\}", lambda leaf: " ".join(leaf[0].split()), text) + "\n", encoding="utf-8")


def minor(version: str) -> str:
    """Return major and minor: "0.10" for "0.10.2"."""
    return ".".join(version.split(".")[:2])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _read(file: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    if not file.exists():
        return {}
    read: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(file.read_text(encoding="utf-8"))
    return read
