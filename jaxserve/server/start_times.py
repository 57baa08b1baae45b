"""How long the last start of the same configuration took, kept in the folder of compiled programs."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from jaxserve.cache_folder import cache_folder
from jaxserve.config import ServeConfig
from jaxserve.version import __version__
from jaxserve.whole_file import write_whole

log = logging.getLogger(__name__)

FOLDER = "starts"
LONGEST = 86400.0  # seconds; a start that took longer tells nothing
# The settings that determine a start: those of these groups, and some of the server's.
GROUPS = ("model", "devices", "kernels", "objectives", "scheduling", "startup", "memory")
MORE = ("api_server_count", "replicas", "max_replicas", "prefill_replicas", "decode_replicas", "ray")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS")
PACKAGES = ("jax", "jaxlib")


class StartTime(NamedTuple):
    """The duration of a start in seconds, and the number of programs that it compiled."""

    seconds: float
    compiled: int = 0


def last_start(config: ServeConfig) -> StartTime | None:
    """Return how long the last start with these settings took on this machine; None if that is unknown."""
    try:
        read = json.loads(_path(config).read_text(encoding="utf-8"))
        last = StartTime(float(read["seconds"]), int(read["compiled"]))
    except (OSError, ValueError, TypeError, LookupError, OverflowError):
        return None
    return last if 0 < last.seconds < LONGEST and last.compiled >= 0 else None


def remember(config: ServeConfig, took: StartTime) -> None:
    """Keep the duration of a start for the next one. A folder that cannot be written is no error."""
    path = _path(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        said = {"seconds": round(took.seconds, 3), "compiled": took.compiled}
        write_whole(path, json.dumps(said).encode())  # another server may read it now
    except OSError as error:
        log.debug("the duration of this start is not kept: %s", error)


def _path(config: ServeConfig) -> Path:
    named = {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.metadata["group"] in GROUPS or field.name in MORE
    }
    around = {name: os.environ.get(name) for name in VARIABLES}
    versions = {name: version_of(name) for name in PACKAGES} | {"jaxserve": __version__}
    facts = json.dumps([named, around, versions, platform.node()], sort_keys=True)
    return cache_folder() / FOLDER / blake2b(facts.encode(), digest_size=16).hexdigest()


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def expectation(last: StartTime | None) -> str:
    """Return when the model will be ready, as far as the last start tells."""
    if last is None:
        return (
            "the model is ready once its programs are compiled and its steps measured: the first start of this "
            "configuration, which can take minutes; later ones use what it keeps"
        )
    took = f"{last.seconds:.0f} s" if last.seconds >= 1 else f"{last.seconds:.1f} s"
    if last.compiled:
        programs = "1 program" if last.compiled == 1 else f"{last.compiled} programs"
        return f"the model is ready in less than {took} (the last start took that, and compiled {programs})"
    return f"the model is ready in about {took} (the last start took that)"
