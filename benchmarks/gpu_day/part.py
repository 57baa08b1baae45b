"""A part of a stage: one child process with a time limit, and what its function receives."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Skip(Exception):
    """Raised by a part that cannot run here, with the reason; it counts as skipped, not as failed."""


@dataclass(frozen=True)
class Part:
    """One measurement that can fail, hang or be repeated without the others."""

    name: str  # unique among all stages; a part with a result under this name is not run again
    stage: str  # A, B, C or D
    seconds: float  # limit of its process, start of Python and compilation included
    call: str  # "module:function"; called as function(run, **arguments). A module without a dot is in this package
    arguments: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    needs: tuple[str, ...] = ()  # modules without which the part is skipped, with their names as the reason
    beside: bool = False  # a check, not a timing: runs beside its neighbors of this kind
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its process


@dataclass
class Run:
    """What the function of a part receives: where to put its figures, and how long it may take."""

    part: Part
    dry: bool  # on a CPU with tiny shapes: tests the script, measures nothing
    output: Path  # JSONL file of this part's records
    folder: Path  # files that a part returns (profiles, tuned configs) and that later parts read
    facts: Mapping[str, Any]  # facts of parts that have finished, such as the ceilings
    deadline: float  # by time.monotonic

    def left(self) -> float:
        """Return the seconds until the process is stopped."""
        return self.deadline - time.monotonic()

    def row(self, table: str, **figures: Any) -> None:
        """Append a row to one of the report's tables; kept even if the part fails later."""
        self._append({"table": table, "row": figures})

    def fact(self, name: str, value: Any) -> None:
        """Record a single value under a name, for the report and for later parts."""
        self._append({"fact": name, "value": value})

    def _append(self, record: Mapping[str, Any]) -> None:
        append(self.output, {"part": self.part.name, **record})


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line, and return once it is on disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())
