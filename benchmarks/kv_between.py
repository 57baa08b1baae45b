"""KV between processes: the speed of each transport, and the pause after the first token that it leaves.

Transports: a child process gives `--pages` pages of `--page-kib` KiB on loopback, in answers of at most 16 pages;
another process takes them. Pause: one prefill and one decode replica of the demo model, in processes of their own;
the time from the first to the second token of a prompt, if the decode replica fetches its KV and if it computes it.

    python benchmarks/kv_between.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import common

from jaxserve.config import ServeConfig
from jaxserve.fleet.processes import EngineProcesses
from jaxserve.fleet.replicas import Replicas
from jaxserve.report.table import print_table
from jaxserve.sched.api.new_request import NewRequest
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.slo import SLO
from jaxserve.wire.address import Address

KEY = b"benchmark"
SIZES = (1, 4, 16)
HEADS, DIM, TOKENS = 2, 64, 16  # of a page, in each of its layers
NOWHERE = "unix:/nonexistent"


def place(layers: int) -> Any:
    """Return where pieces arrive: on one device."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxserve.kv.client import Destination
    from jaxserve.kv.layout import Layout

    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tp",)), PartitionSpec(None, None, None, None, "tp"))
    array = jax.device_put(np.ones((layers, 2, 1, TOKENS, HEADS, DIM), np.float32), sharding)
    layout = Layout("", "benchmark", None, "", "", "float32", TOKENS, ((tuple(array.shape), "float32"),))
    return Destination(layout, "1", (array,), SIZES)


def give(path: str, layers: int) -> None:
    """Give the same piece for any pages, until killed."""
    import jax
    import numpy as np

    from jaxserve.engine.programs.checksum import checksums
    from jaxserve.engine.runtime.kv_pages import Export
    from jaxserve.kv.direct import Direct
    from jaxserve.kv.server import KVServer

    where = place(layers)
    (one,) = where.arrays

    class Pages:
        async def arrive(self, digest: bytes, seconds: float) -> bool:
            return True

        async def export(self, digests: Any, most: int, summed: bool) -> Export:
            count = min(len(digests), most, SIZES[-1])
            piece = (jax.device_put(np.repeat(np.asarray(one), where.size(count), axis=2), one.sharding),)
            return Export(count, piece, checksums(piece) if summed else [])

    async def serve() -> None:
        server = KVServer(Pages(), where.layout, where.shards, one.nbytes, KEY, Direct())
        await server.start(Address(path=path))
        await asyncio.Event().wait()

    asyncio.run(serve())


async def take(path: str, transport: Any, pages: int, layers: int) -> dict[str, float]:
    """Fetch all pages, and then single ones."""
    from jaxserve.kv.client import KVClient
    from jaxserve.kv.direct import Direct

    where = place(layers)
    client = await KVClient.connect(Address(path=path), KEY, where, Direct(), transport)

    async def fetch(count: int) -> float:
        began, left = time.perf_counter(), count
        while left:
            kv_buffer = await client.pages([b"page"] * left)
            assert kv_buffer is not None
            left -= kv_buffer.pages
        return time.perf_counter() - began

    await fetch(21)  # every size once
    seconds = median([await fetch(pages) for _ in range(3)])
    alone = median([await fetch(1) for _ in range(20)])
    client.close()
    return {"mb_per_s": pages * where.arrays[0].nbytes / seconds / 1e6, "one_page_ms": 1e3 * alone}


def transports(args: argparse.Namespace) -> list[dict[str, Any]]:
    layers, rows = max(1, args.page_kib * 1024 // (2 * TOKENS * HEADS * DIM * 4)), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "kv")
        child: Any = multiprocessing.get_context("spawn").Process(target=give, args=(path, layers), daemon=True)
        child.start()
        while not Path(path).exists():
            if not child.is_alive():
                raise SystemExit("the process that gives pages has ended")
            time.sleep(0.05)
        for transport in ("host", "direct"):
            rows.append({"transport": transport, **asyncio.run(take(path, transport, args.pages, layers))})
        child.kill()
        child.join()
    return rows


async def pause(replicas: Replicas, length: int, draw: random.Random) -> float:
    """Return the seconds from the first to the second token of a new prompt."""
    times, over = list[float](), asyncio.Event()

    def told(delta: Any) -> None:
        times.extend([time.perf_counter()] * len(delta.tokens))
        if delta.finish_reason is not None:
            over.set()

    prompt = [draw.randrange(8, 4000) for _ in range(length)]
    replicas.submit(NewRequest(prompt, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0), SLO()), told)
    await over.wait()
    return times[1] - times[0]


async def pauses(args: argparse.Namespace, engines: EngineProcesses, transport: str) -> list[dict[str, Any]]:
    replicas, draw, rows = await Replicas.connect(engines.places), random.Random(args.seed), list[dict[str, Any]]()
    address = replicas.engines[0].kv
    for length in args.lengths:
        for name, where in ((transport, address), ("computed", NOWHERE)):
            replicas.engines[0].kv = where  # as the front tells the decode replica
            await pause(replicas, length, draw)
            found = sorted([await pause(replicas, length, draw) for _ in range(args.requests)])
            rows.append({"prompt": length, "kv": name, "p50_ms": 1e3 * median(found), "max_ms": 1e3 * found[-1]})
    await replicas.refresh()
    client = replicas.engines[1].stats()
    if not client.kv_fetched_pages:
        raise SystemExit("no page was fetched")
    replicas.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=256, help="pages of a measured transfer [%(default)s]")
    parser.add_argument("--page-kib", type=int, default=1024, help="KiB of a page [%(default)s]")
    parser.add_argument("--lengths", type=int, nargs="+", default=[240, 960, 1920], help="tokens [%(default)s]")
    parser.add_argument("--requests", type=int, default=10, help="of each length [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of prompts [%(default)s]")
    common.add_output(parser, "kv_between")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    speeds = transports(args)
    print_table(
        f"{args.pages} pages of {args.page_kib} KiB on loopback",
        ("transport", "MB/s", "one page, ms"),
        [(one["transport"], one["mb_per_s"], one["one_page_ms"]) for one in speeds],
    )
    rows = list[dict[str, Any]]()
    for transport in ("host", "direct"):
        settings: dict[str, Any] = {"kv_transfer": transport, "prefill_replicas": 1, "decode_replicas": 1}
        most = max(args.lengths) + 16
        engines = EngineProcesses(ServeConfig.load(mesh="1x1", max_model_len=most, ttft_slo=1000.0, **settings))
        try:
            engines.wait()
            rows += asyncio.run(pauses(args, engines, transport))
        finally:
            engines.close()
    print_table(
        "From the first token to the second",
        ("prompt, tokens", "KV", "p50, ms", "max, ms"),
        [(one["prompt"], one["kv"], one["p50_ms"], one["max_ms"]) for one in rows],
    )
    common.save(args, {"transports": speeds, "pauses": rows})


if __name__ == "__main__":
    main()
