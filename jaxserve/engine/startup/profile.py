"""Profiling: measures step times before serving, and stores them for the next start."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxserve.cache_folder import cache_folder
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.startup.build import ExecutorConfig
from jaxserve.engine.startup.compiled import compile_counter
from jaxserve.engine.startup.warmup import Progress
from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.executor import Executor
from jaxserve.sched.api.perf import Load
from jaxserve.sched.api.policy import Limits
from jaxserve.sched.perf.buckets import Buckets
from jaxserve.sched.perf.profile import RUNS, Point, measure
from jaxserve.version import __version__
from jaxserve.whole_file import write_whole

log = logging.getLogger(__name__)

SECONDS = {"cpu": 10.0}  # longest profile by platform
ACCELERATOR = 5.0
EARLY = 0.8  # of an engine that serves before all of its programs are ready
CHECK = 0.2  # seconds for a check that a stored profile still holds
FAR = 3.0  # factor by which step times may differ from a stored profile
FOLDER = "profiles"  # inside the folder of compiled programs


def default_seconds(platform: str, *, early: bool = False) -> float:
    """Return the longest time to measure. early: before an engine serves with its first programs."""
    return EARLY if early else SECONDS.get(platform, ACCELERATOR)


def buckets_of(executor: JaxExecutor, *, ready: bool = True) -> Buckets:
    """Return the sizes of an executor's step programs. ready: of those that are in use."""
    buckets = [bucket for bucket in executor.state.programs.limits.buckets if not ready or bucket in executor.ready]
    return Buckets(
        tuple(bucket.rows for bucket in buckets if bucket.decode),
        tuple(bucket.tokens for bucket in buckets if bucket.prompts),
    )


def facts(config: ExecutorConfig, executor: JaxExecutor, model: str) -> dict[str, Any]:
    """Return everything that step times depend on; a profile is valid if all of it is equal."""
    state = executor.state
    device = state.mesh.devices.flat[0]
    spec, limits = hashlib.sha256(repr(config.spec).encode()).hexdigest()[:16], state.programs.limits
    return {
        "model": model,
        "spec": spec,
        "device": device_name(),
        "platform": device.platform,
        "cores": os.cpu_count(),
        "mesh": str(config.mesh),
        "dtype": str(state.weights["embed"].dtype),
        "kv_dtype": str(state.pools[0][0].dtype),
        "attention": state.programs.attention,
        "backends": [config.experts_backend, config.products_backend, config.sampling_backend, config.mlp_backend],
        "limits": asdict(limits),
        "preempt": config.preempt_boundary,
        "draft": repr(config.speculative),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": [__version__, jax.__version__],
    }


def device_name() -> str:
    """Return the kind of the devices in use, as jax names it."""
    return str(jax.devices()[0].device_kind)


class ProfileCache:
    """A profile on disk, in a file named by the facts of its engine."""

    def __init__(self, known: Mapping[str, Any], folder: Path | None = None) -> None:
        self._facts = json.loads(json.dumps(known))  # as they are read back from a file
        text = json.dumps(self._facts, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.path = (cache_folder() if folder is None else folder) / FOLDER / f"{name}.json"

    def load(self) -> list[Point] | None:
        """Return the stored profile, or None. A file that cannot be read is logged and ignored."""
        if not self.path.is_file():
            return None
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["facts"] != self._facts:
                return None
            points = [(Load(*load), float(seconds)) for load, seconds in kept["points"]]
            if not points or not all(0 < seconds < float("inf") for _, seconds in points):
                raise ValueError(f"{len(points)} points: at least one is needed, with finite times above 0")
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the stored profile %s cannot be read (%s): measuring step times again", self.path, error)
            return None
        return points

    def save(self, points: list[Point]) -> None:
        """Replace the file atomically. A folder that is not writable is logged; serving continues."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps({"facts": self._facts, "points": points}).encode())
        except OSError as error:
            if compile_counter().writable:  # otherwise logged already
                log.warning("the profile cannot be stored in %s: %s", self.path, error)


def measured(
    executor: Executor,
    limits: Limits,
    max_model_len: int,
    buckets: Buckets,
    seconds: float,
    *,
    runs: int = RUNS,
    progress: Progress | None = None,
) -> list[Point]:
    """Run `measure` in a new event loop, whether or not this thread has one."""

    def told(share: float) -> None:
        if progress is not None:
            progress(int(100 * share), 100, "measuring step times")

    async def measuring() -> list[Point]:
        return await measure(executor, limits, max_model_len, buckets, seconds, runs=runs, progress=told)

    with ThreadPoolExecutor(1, thread_name_prefix="jaxserve-profile") as thread:
        return thread.submit(asyncio.run, measuring()).result()


def holds(points: list[Point], executor: Executor, limits: Limits, max_model_len: int, buckets: Buckets) -> bool:
    """Return whether a stored profile still describes this machine.

    A few steps run again. If all are FAR times faster or all are FAR times slower than stored, other
    work slowed the machine then or now.
    """
    known = dict(points)
    again = measured(executor, limits, max_model_len, buckets, CHECK, runs=2)
    ratios = [took / known[load] for load, took in again if load in known]
    return not ratios or (min(ratios) < FAR and max(ratios) > 1 / FAR)


def check_measured_on(name: str, known: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise InvalidValue if a latency preset is for another model or device than this engine's."""
    for what, value in known.items():
        mine = here.get(what, "")
        if value and mine and not _same(value, mine):
            raise InvalidValue(
                f"perf={name!r} was measured for {what} {value!r}, but this server has {mine!r}: measure it here "
                "with `jaxserve profile`, or leave --perf out",
                "perf",
            )


def _same(one: str, other: str) -> bool:
    """Compare the last parts of names: equal if one has all words of the other (`H200`, `NVIDIA H200`)."""
    first, second = (set(re.split(r"[\s_-]+", name.rstrip("/").rpartition("/")[2].lower())) for name in (one, other))
    return first <= second or second <= first
