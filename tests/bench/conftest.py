"""Make the package `benchmarks`, which is not installed, importable; installed packages come first."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2]))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the first bytes of a picture instead of drawing it, which takes a second."""
    drawn = SimpleNamespace(plot=lambda path, *given: path.write_bytes(b"\x89PNG"))
    monkeypatch.setitem(sys.modules, "jaxserve.bench.plots", drawn)
