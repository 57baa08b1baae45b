"""Distribution of tests to pytest-xdist workers: tests that share an engine go to one worker, long groups first."""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

MOST = 4  # each worker may hold 4 GiB, mostly programs compiled by XLA
FEW = 3  # up to this many files given by name run in this process

# Files of tests/server on the engine double, which need nothing of the session's engine: groups of their own.
DOUBLES = tuple(
    f"tests/server/test_{name}.py"
    for name in (
        "bodies", "connections", "dashboard", "documented", "fairness", "generation", "hostile_values",
        "live", "long_texts", "messages", "proxy", "refusals", "responses", "settings", "text", "tls", "writers",
    )
)  # fmt: skip

# Files that share session fixtures or executors cached in a process. Longest first: a group that starts
# last would run alone at the end. Every other file is a group of its own.
GROUPS = {
    "server": ("tests/server/",),
    # These share the executors of tests/support/parity/asks.py.
    "schedules": ("tests/parity/test_cascade.py", "tests/parity/test_filtered.py", "tests/parity/test_law.py",
                  "tests/parity/test_pooled.py", "tests/parity/test_resumed.py", "tests/parity/test_roles.py",
                  "tests/parity/test_served_journal.py", "tests/parity/test_speculation.py",
                  "tests/parity/test_structured.py", "tests/parity/test_tiers.py"),
    "parity": ("tests/parity/",),
    "steps": ("tests/engine/test_executor.py", "tests/engine/test_hosts.py", "tests/engine/test_mesh.py",
              "tests/engine/test_parameters.py", "tests/engine/test_segments.py"),
    "precision": ("tests/engine/test_kv_dtype.py", "tests/engine/test_quantized.py"),
    "names": ("tests/server/test_names.py", "tests/server/test_tiers.py"),
    # Servers and engines in processes of their own: a lane, so that they neither run beside each other nor
    # keep tests that share an engine waiting.
    "processes": ("tests/ray/", "tests/server/test_ending.py", "tests/server/test_handoff_processes.py",
                  "tests/server/test_killed.py", "tests/notebooks/test_notebooks.py",
                  "tests/server/test_operations_processes.py", "tests/server/test_processes.py",
                  "tests/server/test_resource_limits.py",
                  "tests/server/test_rolling_processes.py", "tests/server/test_scaled_processes.py",
                  "tests/server/test_signals.py"),
    "scripts": ("tests/bench/test_scripts.py",),
    "distillation": ("tests/training/",),
    "logits": ("tests/models/test_parity.py",),
    "drafting": ("tests/engine/test_drafting.py",),
    "profile": ("tests/engine/test_profile.py",),
    "faults": ("tests/engine/test_faults.py", "tests/engine/test_fault_matrix.py"),
    "cli": ("tests/test_cli.py",),
}  # fmt: skip
ORDER = {name: place for place, name in enumerate(GROUPS)}


def group(path: str) -> str:
    """Return the group of a file by the longest matching prefix."""
    if path in DOUBLES:
        return path
    fits = [(len(start), name) for name, starts in GROUPS.items() for start in starts if path.startswith(start)]
    return max(fits)[1] if fits else path


def place(path: str) -> tuple[int, str]:
    """Return the sort key of a test's group."""
    name = group(path)
    return ORDER.get(name, len(ORDER)), name


def number(config: pytest.Config) -> int:
    """Return the number of workers for `-n auto`; 0 runs tests in this process, where a few tests start sooner."""
    if given := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(given)
    files = [argument for argument in config.args if argument.endswith(".py")]
    few = len(files) == len(config.args) <= FEW or any("::" in argument for argument in config.args)
    if few or config.option.keyword or config.option.collectonly:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST)


class Grouped(LoadScopeScheduling):  # type: ignore[misc]
    """An xdist scheduler that distributes groups in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])
