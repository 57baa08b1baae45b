"""Pages in host memory: between KV buffers on devices and single pages, and the medium of the host tier.

A page is a tuple of arrays, of the model and of a draft model if there is one. With pinned memory
these are jax arrays [L, parts, 1, B, K, D] in pinned host memory, which devices read and write without
the CPU. Otherwise they are numpy arrays [L, parts, B, K, D] of bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.engine.memory.transfer import KVBuffer, cut
from jaxserve.sched.cluster.copy_out import BATCH
from jaxserve.sched.cluster.kv_tier import Codec, Stored

Bytes = npt.NDArray[np.uint8]
Page = tuple[Any, ...]
PINNED = "pinned_host"


class PageCodec(Codec, Protocol):
    """A codec of an engine, which disks need as well: it turns pages into numpy arrays and back."""

    def plain(self, page: Page) -> tuple[Bytes, ...]:
        """Return the contents of a page as arrays of bytes."""

    def of(self, plain: tuple[Bytes, ...]) -> Page:
        """Return the page with these contents."""


class NumpyPages:
    """Pages as numpy arrays of bytes. `sizes`: pages in the pieces that instances can import."""

    grain = BATCH

    def __init__(self, example: KVBuffer, sizes: Sequence[int], threads: ThreadPoolExecutor) -> None:
        """example: a buffer of a page, for the dtypes."""
        self._dtypes = tuple(array.dtype for array in example.pieces[0][1])
        self._sizes = tuple(sizes)
        self._threads = threads

    async def split(self, kv_buffers: Sequence[KVBuffer]) -> list[Page]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._split, kv_buffers)

    def _split(self, kv_buffers: Sequence[KVBuffer]) -> list[Page]:
        pages: list[Page] = []
        for kv_buffer in kv_buffers:
            for count, piece in kv_buffer.pieces:
                arrays = [np.asarray(array).view(np.uint8) for array in piece]  # waits for the gather
                pages += [tuple(array[:, :, at].copy() for array in arrays) for at in range(count)]
        return pages

    async def join(self, pages: Sequence[Page]) -> KVBuffer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._join, pages)

    def _join(self, pages: Sequence[Page]) -> KVBuffer:
        pieces: list[tuple[int, Page]] = []
        for size, mine in cut(range(len(pages)), self._sizes):
            arrays = []
            for part, dtype in enumerate(self._dtypes):
                first = pages[mine[0]][part]
                array = np.zeros((*first.shape[:2], size, *first.shape[2:]), np.uint8)
                for place, at in enumerate(mine):
                    array[:, :, place] = pages[at][part]
                arrays.append(array.view(dtype))
            pieces.append((len(mine), tuple(arrays)))
        return KVBuffer(len(pages), tuple(pieces))

    def plain(self, page: Page) -> tuple[Bytes, ...]:
        return page

    def of(self, plain: tuple[Bytes, ...]) -> Page:
        return plain


class PinnedPages:
    """Pages as jax arrays in pinned host memory, one page a piece, so that no program has to cut them."""

    grain = 1

    def __init__(self, example: KVBuffer, threads: ThreadPoolExecutor) -> None:
        """example: a buffer of a page, for the dtypes and shardings."""
        arrays = example.pieces[0][1]
        self._dtypes = tuple(array.dtype for array in arrays)
        self._shardings = tuple(array.sharding.with_memory_kind(PINNED) for array in arrays)
        self._threads = threads

    async def split(self, kv_buffers: Sequence[KVBuffer]) -> list[Page]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._split, kv_buffers)

    def _split(self, kv_buffers: Sequence[KVBuffer]) -> list[Page]:
        pages: list[Page] = [self._pin(kv_buffer.pieces[0][1]) for kv_buffer in kv_buffers]
        jax.block_until_ready(pages)
        return pages

    def _pin(self, arrays: Sequence[Any]) -> Page:
        return tuple(jax.device_put(array, where) for array, where in zip(arrays, self._shardings, strict=True))

    async def join(self, pages: Sequence[Page]) -> KVBuffer:
        return KVBuffer(len(pages), tuple((1, page) for page in pages))

    def plain(self, page: Page) -> tuple[Bytes, ...]:
        return tuple(np.asarray(array).view(np.uint8)[:, :, 0] for array in page)

    def of(self, plain: tuple[Bytes, ...]) -> Page:
        arrays = (array[:, :, None].view(dtype) for array, dtype in zip(plain, self._dtypes, strict=True))
        return self._pin(tuple(arrays))


def pins(device: jax.Device) -> bool:
    """Return whether to keep pages in pinned memory: on accelerators that have it."""
    return device.platform != "cpu" and any(memory.kind == PINNED for memory in device.addressable_memories())


class HostMemory:
    """The medium of the host tier. Writer: the KVTier that owns it."""

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}

    async def write(self, several: Sequence[Stored]) -> Sequence[bytes]:
        self._pages |= {stored.copy.digest: stored.page for stored in several}
        return [stored.copy.digest for stored in several]

    async def read(self, digests: Sequence[bytes]) -> Sequence[Page | None]:
        return [self._pages.get(digest) for digest in digests]

    def take(self, digest: bytes) -> Page | None:
        return self._pages.pop(digest, None)
