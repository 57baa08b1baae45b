"""Refuse to import what the borrowed machine lacks. Python runs this file at its start if its folder is on the path."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class Refusing(MetaPathFinder):
    """Finds nothing, and raises ModuleNotFoundError for the names of JAXSERVE_REFUSED."""

    def __init__(self) -> None:
        self._names = frozenset(os.environ.get("JAXSERVE_REFUSED", "").split(","))

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"{fullname} is not on the borrowed machine", name=fullname)


sys.meta_path.insert(0, Refusing())
