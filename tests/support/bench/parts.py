"""Run a part of the day of the GPU in this process."""

from __future__ import annotations

import importlib
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.part import Part, Run


def run_part(part: Part, folder: Path, facts: dict[str, Any] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Call a part's function as a dry run, and return its rows by table; facts are in the table `facts`."""
    folder.mkdir(exist_ok=True)
    output = folder / "records.jsonl"
    module, _, name = part.call.partition(":")
    function = getattr(importlib.import_module(f"benchmarks.gpu_day.{module}"), name)
    function(Run(part, True, output, folder, facts or {}, time.monotonic() + part.seconds), **part.arguments)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in map(json.loads, output.read_text(encoding="utf-8").splitlines()):
        assert record["part"] == part.name
        if "fact" in record:
            found["facts"].append({record["fact"]: record["value"]})
        else:
            found[record["table"]].append(record["row"])
    return found
