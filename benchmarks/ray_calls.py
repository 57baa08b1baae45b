"""Compare two ways of tokens from an engine to a front: jaxserve's connection, and calls of Ray.

A sender in another process sends `--messages` messages of `--size` bytes, one every `--every` ms, as an engine does
after each step. Each holds the time at which it was sent; the receiver notes how old it is, and both processes the CPU
time that they have used. Ray streams them from a generator of an actor, as its serving library does.

    python benchmarks/ray_calls.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import struct
import time
from collections.abc import AsyncIterator
from statistics import median, quantiles
from typing import Any

import common

from jaxserve.report.table import print_table
from jaxserve.wire.address import Address
from jaxserve.wire.connection import Connection

KEY = b"of a benchmark"
STAMP = "d"


def stamped(size: int) -> bytes:
    return struct.pack(STAMP, time.monotonic()).ljust(size, b"\0")


def age(message: bytes) -> float:
    return time.monotonic() - float(struct.unpack_from(STAMP, message)[0])


def cpu() -> float:
    """Return the CPU time of this process so far, in seconds."""
    used = os.times()
    return used.user + used.system


def sender(args: argparse.Namespace, control: Any) -> None:
    """Serve one connection: send the messages, then say how much CPU time they took."""

    async def work() -> None:
        opened: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def made() -> Connection:
            return Connection(
                KEY, "engine", opened=opened.set_result, received=lambda frame: None, lost=lambda why: None
            )

        server, bound = await Address(host="127.0.0.1").listen(made)
        control.send(bound.port)
        connection, began = await opened, cpu()
        for _ in range(args.messages):
            connection.send(stamped(args.size))
            await asyncio.sleep(args.every / 1e3)
        control.send(cpu() - began)
        server.close()

    asyncio.run(work())


async def own(args: argparse.Namespace) -> dict[str, Any]:
    """Measure jaxserve's connection."""
    spawn = multiprocessing.get_context("spawn")
    control, theirs = spawn.Pipe()
    process = spawn.Process(target=sender, args=(args, theirs))
    process.start()
    port = await asyncio.to_thread(control.recv)
    ages: list[float] = []
    made: list[Connection] = []

    def opened() -> Connection:
        made.append(
            Connection(
                KEY, "front", opened=lambda c: None, received=lambda f: ages.append(age(f)), lost=lambda why: None
            )
        )
        return made[0]

    began = cpu()
    await Address(host="127.0.0.1", port=port).connect(opened)
    while len(ages) < args.messages:
        await asyncio.sleep(0.05)
    received = cpu() - began
    sent = await asyncio.to_thread(control.recv)
    made[0].close()
    process.join()
    return summary("connection", ages, sent, received)


class Sender:
    """The actor that sends."""

    async def messages(self, count: int, size: int, every: float) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield stamped(size)
            await asyncio.sleep(every / 1e3)

    async def cpu(self) -> float:
        return cpu()


async def through_ray(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a streaming generator of an actor, in a cluster of this machine."""
    import ray

    from jaxserve.ray.cluster import own_options

    ray.init(address="local", num_cpus=2, **own_options())
    try:
        actor: Any = ray.remote(Sender).remote()
        ages, theirs = list[float](), await actor.cpu.remote()
        began = cpu()
        stream = actor.messages.options(num_returns="streaming").remote(args.messages, args.size, args.every)
        async for message in stream:
            ages.append(age(await message))
        received = cpu() - began
        return summary("Ray", ages, await actor.cpu.remote() - theirs, received)
    finally:
        ray.shutdown()


def summary(way: str, ages: list[float], sent: float, received: float) -> dict[str, Any]:
    count = len(ages)
    return {
        "way": way,
        "age_p50_us": 1e6 * median(ages),
        "age_p99_us": 1e6 * quantiles(ages, n=100)[-1],
        "cpu_sender_us": 1e6 * sent / count,
        "cpu_receiver_us": 1e6 * received / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=2000, help="messages [%(default)s]")
    parser.add_argument("--size", type=int, default=1024, help="bytes of each [%(default)s]")
    parser.add_argument("--every", type=float, default=5.0, help="ms between two [%(default)s]")
    common.add_output(parser, "ray_calls")
    args = parser.parse_args()
    rows = [asyncio.run(way(args)) for way in (own, through_ray)]
    names = ("way", "age_p50_us", "age_p99_us", "cpu_sender_us", "cpu_receiver_us")
    heads = ("way", "age p50, µs", "age p99, µs", "CPU of the sender, µs each", "CPU of the receiver, µs each")
    print_table(
        f"{args.messages} messages of {args.size} bytes", heads, [[row[name] for name in names] for row in rows]
    )
    common.save(args, {"rows": rows})


if __name__ == "__main__":
    main()
