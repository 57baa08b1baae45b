"""The recorded bounds in `bounds.json`, by target, then by minor version of jax and release of ptxas, then by case.

A key is "0.10 ptxas 13.5.37" for a GPU and "0.10" for a TPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pallas_kernels.gate.rules import Bound

FILE = Path(__file__).with_name("bounds.json")
Bounds = dict[str, Bound]  # by case


def load(target: str, jax: str, file: Path = FILE, *, ptxas: str = "") -> tuple[Bounds, str]:
    """Return the bounds for the minor version of `jax` and a release of ptxas, and the key they were recorded under.

    Those are the bounds of the newest recorded jax that is not above `jax`; of several, those of
    this ptxas, or else of the newest. ({}, "") if there are none.
    """
    recorded = _read(file).get(target, {})
    known = [key for key in recorded if _parts(key)[0] <= _number(minor(jax))]
    if not known:
        return {}, ""
    best = max(known, key=lambda key: (_parts(key)[0], key == key_of(jax, ptxas), _parts(key)[1]))
    return {case: Bound(**bound) for case, bound in recorded[best].items()}, best


def record(
    target: str, jax: str, recorded: Mapping[str, Bound], file: Path = FILE, *, ptxas: str = "", whole: bool = False
) -> None:
    """Write `found` over the recorded bounds; cases not in it keep theirs, unless it is the `whole` set."""
    everything = _read(file)
    versions, key = everything.setdefault(target, {}), key_of(jax, ptxas)
    kept = {} if whole else versions.get(key, {})
    versions[key] = {**kept, **{case: asdict(bound) for case, bound in recorded.items()}}
    text = json.dumps(everything, indent=1, sort_keys=True)
    # One case per line, so that changing one is a one-line diff.
    file.write_text(re.sub(r"\{[^{}]*\}", lambda leaf: " ".join(leaf[0].split()), text) + "\n", encoding="utf-8")


def key_of(jax: str, ptxas: str = "") -> str:
    """Return the key of a version of jax and a release of ptxas."""
    return f"{minor(jax)} ptxas {ptxas}" if ptxas else minor(jax)


def minor(version: str) -> str:
    """Return major and minor: "0.10" for "0.10.2"."""
    return ".".join(version.split(".")[:2])


def _parts(key: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of a key's jax and of its ptxas."""
    jax, _, release = key.partition(" ptxas ")
    return _number(jax), _number(release)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def _read(file: Path) -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    if not file.exists():
        return {}
    read: dict[str, dict[str, dict[str, dict[str, int]]]] = json.loads(file.read_text(encoding="utf-8"))
    return read
