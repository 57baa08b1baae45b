"""PagesHeader of KV without an engine, on a mesh of emulated devices, and a process that gives them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.programs.checksum import checksums
from jaxserve.engine.runtime.kv_pages import Export
from jaxserve.kv.client import Destination
from jaxserve.kv.direct import Direct
from jaxserve.kv.layout import Layout
from jaxserve.kv.server import KVServer
from jaxserve.wire.address import Address

KEY = b"key"
SIZES = (1, 4, 16)
LAYOUT = Layout("1", "tiny", None, "dummy", "abc", "float32", 4, (((3, 2, 1, 4, 4, 8), "float32"),))
PAGES = 40


def digest(page: int) -> bytes:
    return page.to_bytes(16, "big")


DIGESTS = [digest(page) for page in range(PAGES)]


def content(dtype: Any = np.float32, pages: int = PAGES, heads: int = 4, dim: int = 8) -> Any:
    """Return the same random KV in every process: [L, parts, N, B, K, D]."""
    draw = np.random.default_rng(7)
    return draw.integers(0, 255, (3, 2, pages, 4, heads, dim), np.uint8).astype(np.float32).astype(dtype)


def sharding(tp: int) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:tp]), ("tp",))
    return NamedSharding(mesh, PartitionSpec(None, None, None, None, "tp"))


def place(tp: int, kv: Any, layout: Layout = LAYOUT) -> Destination:
    """Return where pages of `kv` arrive, on `tp` devices."""
    array = jax.device_put(np.zeros_like(kv[:, :, :1]), sharding(tp))
    return Destination(layout, f"{tp} shards", (array,), SIZES)


class Given:
    """A PageSource with the first `there` pages of `kv`."""

    def __init__(self, kv: Any, tp: int, there: int = PAGES) -> None:
        self.kv, self.there = kv, there
        self.wrong = 0  # added to checksums
        self.exports = 0
        self._sharding = sharding(tp)

    async def arrive(self, digest: bytes, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while digest not in DIGESTS[: self.there]:
            if loop.time() >= end:
                return False
            await asyncio.sleep(0.001)
        return True

    async def export(self, digests: Sequence[bytes], most: int, summed: bool) -> Export | None:
        have = [DIGESTS.index(one) for one in digests if one in DIGESTS[: self.there]][: min(most, SIZES[-1])]
        if not have:
            return None
        self.exports += 1
        size = next(size for size in SIZES if size >= len(have))
        piece = (jax.device_put(self.kv[:, :, have + have[-1:] * (size - len(have))], self._sharding),)
        return Export(len(have), piece, [one + self.wrong for one in checksums(piece)] if summed else [])


def serve(given: Given, tp: int, direct: Direct | None, layout: Layout = LAYOUT, page_bytes: int = 1) -> KVServer:
    return KVServer(given, layout, f"{tp} shards", max(1, page_bytes), KEY, direct)


async def child(path: str, tp: int, dim: int) -> None:
    """Serve pages until killed."""
    server = serve(Given(content(dim=dim), tp), tp, Direct())
    await server.start(Address(path=path))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(child(str(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
