"""Make the package `benchmarks`, which is not installed, importable; installed packages come first."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
