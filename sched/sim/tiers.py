"""Simulated KV tiers: the index and the fetches that serve, on links with a bandwidth and a latency."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ..api.errors import InvalidValue
from ..cluster.kv_tier import KVTier, Stored
from .clock import EVENT, VirtualLoop
from .executor import Device, SimKVBuffer


@dataclass(frozen=True, slots=True)
class Tiers:
    """Sizes in bytes, for all instances together; 0: no such tier. Bandwidths in bytes/s, latencies in seconds.

    host_bandwidth: ASSUMED 50 GB/s in each direction per instance and all devices of it together: PCIe
        Gen5 x16 of one device, of which the data sheet of the H200 says 64 GB/s.
    disk_bandwidth: ASSUMED 12 GB/s, two NVMe drives of PCIe Gen5 (PUBLISHED: up to 14 GB/s to read and
        10 GB/s to write for one, but in few and long requests).
    """

    host_memory: int = 0
    disk_size: int = 0
    host_bandwidth: float = 50e9
    disk_bandwidth: float = 12e9
    host_latency: float = 20e-6
    disk_latency: float = 200e-6

    def __post_init__(self) -> None:
        for name in ("host_memory", "disk_size", "host_latency", "disk_latency"):
            if getattr(self, name) < 0:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be 0 or more", name)
        for name in ("host_bandwidth", "disk_bandwidth"):
            if not getattr(self, name) > 0:
                raise InvalidValue(f"{name}={getattr(self, name)!r} must be more than 0 bytes/s", name)

    def make(self, device: Device, loop: VirtualLoop) -> list[KVTier]:
        """Return the tiers, the fastest first. Each passes what it evicts to the next."""
        size, codec = device.page_size * device.kv_bytes_per_token, SimCodec()
        tiers: list[KVTier] = []
        for name, room, bandwidth, latency in (
            ("disk", self.disk_size, self.disk_bandwidth, self.disk_latency),
            ("host", self.host_memory, self.host_bandwidth, self.host_latency),
        ):
            if room:
                medium = SimMedium(size, bandwidth, latency, loop)
                below = tiers[0] if tiers else None
                seconds = size / bandwidth
                tier = KVTier(name, room // size, size, medium, codec, lambda: loop.now, seconds=seconds, below=below)
                tiers.insert(0, tier)
        return tiers


NO_TIERS = Tiers()


class SimCodec:
    """Pages without contents."""

    grain = 64

    async def split(self, kv_buffers: Sequence[SimKVBuffer]) -> Sequence[int]:
        return [0] * sum(kv_buffer.pages for kv_buffer in kv_buffers)

    async def join(self, pages: Sequence[int | None]) -> SimKVBuffer:
        return SimKVBuffer(len(pages), None)


class SimMedium:
    """A link with one read and one write at a time. Writer: the KVTier that owns it."""

    def __init__(self, page_bytes: int, bandwidth: float, latency: float, loop: VirtualLoop) -> None:
        self._each = page_bytes / bandwidth
        self._latency = latency
        self._loop = loop
        self._read_free = self._write_free = 0.0

    async def write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        self._write_free = max(self._write_free, self._loop.now) + self._latency + len(several) * self._each
        await self._until(self._write_free)
        return [page.copy.digest for page in several]

    async def read(self, digests: Sequence[bytes]) -> Sequence[int | None]:
        self._read_free = max(self._read_free, self._loop.now) + self._latency + len(digests) * self._each
        await self._until(self._read_free)
        return [0] * len(digests)

    def take(self, digest: bytes) -> int:
        return 0

    def _until(self, when: float) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        self._loop.at(when, EVENT, _end, done)
        return done


def _end(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
