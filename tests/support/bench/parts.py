"""Run a part of the day of the GPU in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.child import function_of
from benchmarks.gpu_day.part import Part, Run, records
from benchmarks.gpu_day.state import State


def run_of(part: Part, folder: Path, facts: dict[str, Any] | None = None) -> Run:
    """Return what a part's function receives in a dry run."""
    state = State(folder)
    state.append({"part": part.name, "begin": True})
    return Run(part, True, state.path, state.files, facts or {}, time.monotonic() + 10 * part.seconds)


def run_part(part: Part, folder: Path, facts: dict[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Call a part's function as a dry run, and return its rows by table; facts are in the table `facts`."""
    run = run_of(part, folder, facts)
    function_of(part)(run, **part.arguments)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records(run.output):
        assert record["part"] == part.name
        if "fact" in record:
            found["facts"].append({record["fact"]: record["value"]})
        elif "table" in record:
            found[record["table"]].append(record["row"])
    return found
