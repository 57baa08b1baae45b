"""The KV tiers of an engine behind the prefix caches of its instances: host memory, then disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.config import ServeConfig
from jaxserve.engine.memory.disk_pages import DiskPages
from jaxserve.engine.memory.host_pages import HostMemory, NumpyPages, PageCodec, PinnedPages, pins
from jaxserve.engine.memory.transfer import KVBuffer, piece_sizes
from jaxserve.engine.runtime.executor import JaxExecutor
from jaxserve.engine.runtime.info import TierTotals
from jaxserve.errors import InvalidValue
from jaxserve.models.source import find_model
from jaxserve.sched.cluster.kv_tier import KVTier
from jaxserve.version import __version__

log = logging.getLogger(__name__)

HOST_BANDWIDTH, DISK_BANDWIDTH = 10e9, 1e9  # bytes/s: expected until fetches have been measured
FORMAT = 1  # of the contents of pages


class KVTiers:
    """The tiers, the fastest first; none by default. Writer: the Machine that owns them."""

    def __init__(self, config: ServeConfig, executors: Sequence[JaxExecutor]) -> None:
        self.tiers: list[KVTier] = []
        self._disk: DiskPages | None = None
        self._threads: ThreadPoolExecutor | None = None
        if not (config.kv_host_memory or config.kv_disk_size):
            return
        executor = executors[0]
        piece = executor.state.kv_buffer(1)
        shapes = [_bytes_of(array) for array in piece]
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="jaxserve-kv-tiers")
        codec: PageCodec
        if pins(executor.state.mesh.devices.flat[0]):
            codec = PinnedPages(KVBuffer(1, ((1, piece),)), self._threads)
        else:
            sizes = piece_sizes(executor.state.programs.limits.row_pages)
            codec = NumpyPages(KVBuffer(1, ((1, piece),)), sizes, self._threads)
        size = sum(int(np.prod(shape)) for shape in shapes)
        if config.kv_disk is not None:
            self._disk = DiskPages(
                Path(config.kv_disk), model_digest(config, executor), shapes, codec, config.kv_disk_size
            )
            self.tiers = [self._disk_tier(self._disk, config.kv_disk_size, codec, executor)]
        if config.kv_host_memory:
            capacity = _pages("kv_host_memory", config.kv_host_memory, size)
            below = self.tiers[0] if self.tiers else None
            seconds, medium = size / HOST_BANDWIDTH, HostMemory()
            tier = KVTier("host", capacity, size, medium, codec, executor.now, seconds=seconds, below=below)
            self.tiers.insert(0, tier)
        for tier in self.tiers:
            log.info("KV tier %s: %d of %d pages of %d bytes", tier.name, len(tier.index), tier.index.capacity, size)

    def _disk_tier(self, disk: DiskPages, room: int, codec: PageCodec, executor: JaxExecutor) -> KVTier:
        size = disk.page_bytes
        capacity = _pages("kv_disk_size", room, size)
        tier = KVTier("disk", capacity, size, disk, codec, executor.now, seconds=size / DISK_BANDWIDTH)
        for copy in disk.stored():
            if not tier.admit(copy):
                disk.take(copy.digest)
        return tier

    @property
    def first(self) -> KVTier | None:
        """The tier that gets copies of pages."""
        return self.tiers[0] if self.tiers else None

    def totals(self) -> dict[str, TierTotals]:
        """Return a snapshot of each tier, by name."""
        return {tier.name: _totals(tier) for tier in self.tiers}

    async def flush(self, seconds: float) -> None:
        """Let a restart find what host memory holds: write it to the disk for up to `seconds`."""
        if len(self.tiers) > 1:
            log.info("%d KV pages of host memory were written to the disk", await self.tiers[0].flush(seconds))

    def close(self) -> None:
        """Wait for writes to the disk, and let other processes have the folder."""
        if self._threads is not None:
            self._threads.shutdown()
        if self._disk is not None:
            self._disk.close()


def _totals(tier: KVTier) -> TierTotals:
    pages, stats = len(tier.index), tier.stats
    return TierTotals(
        pages,
        pages * tier.page_bytes,
        stats.hits,
        stats.stores,
        tier.index.evictions,
        stats.skipped,
        stats.missing,
        stats.fetches,
        stats.seconds,
    )


def _pages(name: str, room: int, size: int) -> int:
    if room < size:
        raise InvalidValue(f"{name}={room} must be at least {size}, the bytes of one page", name)
    return room // size


def _bytes_of(array: jax.Array) -> tuple[int, ...]:
    """Return the shape of the bytes of a page: that of the array [L, parts, 1, B, K, D] without the 1."""
    first, parts, _, *rest, last = array.shape
    return first, parts, *rest, last * array.dtype.itemsize


def model_digest(config: ServeConfig, executor: JaxExecutor) -> bytes:
    """Return a digest of everything that the contents of pages depend on."""
    state = executor.state
    programs = state.programs
    facts: dict[str, Any] = {
        "format": FORMAT,
        "versions": [__version__, jax.__version__],
        "model": config.model_source,
        "spec": repr(programs.spec),
        "weights": _fingerprint(config.model_source, config.revision, config.load_format, config.seed or 0),
        "dtype": str(state.weights["embed"].dtype),
        "kv": [[str(array.dtype), array.shape] for array in state.kv_buffer(1)],
        "page_size": programs.limits.page_size,
        "devices": [state.mesh.devices.flat[0].platform, state.mesh.devices.flat[0].device_kind, state.mesh.size],
        "attention": programs.attention,
    }
    draft = config.speculative
    if draft is not None and draft.model is not None:
        facts["draft"] = [draft.model, _fingerprint(draft.model, draft.revision, config.load_format, config.seed or 0)]
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).digest()


def _fingerprint(model: str, revision: str | None, load_format: str, seed: int) -> list[Any]:
    """Return names, sizes and times of the files of a model, or the seed of its random weights."""
    folder = find_model(model, revision, load_format).folder
    if load_format == "dummy" or folder is None:
        return [seed]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
