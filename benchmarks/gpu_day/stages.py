"""The stages and their parts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from .part import Part

STAGES = "ABCD"
MODULES = tuple(f"{__package__}.stage_{letter}" for letter in "abcd")  # each has parts(dry) -> list[Part]


def all_parts(dry: bool, modules: Sequence[str] = MODULES) -> list[Part]:
    """Return the parts of all stages, in the order in which they run. Raises ValueError if two have one name."""
    found: list[Part] = []
    for module in modules:
        found += importlib.import_module(module).parts(dry)
    names = [part.name for part in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several parts are named {', '.join(sorted(twice))}")
    return found
