"""Run a server for a long time at twice its sustainable load, with random cancellations and role changes.

    python benchmarks/soak.py                    # 20 minutes: a table and JSON; exits with 1 if a check fails
    python benchmarks/soak.py --minutes 0.5

The server runs in its own process. Its capacity is measured first, with as many clients as it has rows; then requests
arrive as a Poisson process at `--load` times that rate. Some are best effort, some have unattainable objectives (and
are demoted to best effort), and some are abandoned by their clients before or during the answer, by a closed or by a
reset connection. Every few seconds the instances change roles. Prefills are preempted between layers.

At the end, when all requests have ended, the script checks that the server holds no pages, requests, suspended steps or
additional tasks, that pages and slots are conserved, that nothing was compiled, and that memory did not grow. Every
accepted request must have finished or have ended with an error that its client received.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import ROOT, add_output, save

from jaxserve.report.table import print_table

ROLES = ("prefill", "decode", "mixed")
ROWS, LENGTH = 8, 384  # rows per instance; maximum tokens of a request
TIGHT_MS = 1.0  # an unattainable TTFT objective
PATIENCE = 3600.0  # seconds without output after which a request counts as lost; best effort waits until the load falls

ADMIN = "soak"  # API key of the route that changes roles


# ---- the server process ----


def child(flags: Sequence[str]) -> int:
    """Serve, and answer each line on stdin with the state of the engine as JSON, until an empty line."""
    from jaxserve.config import ServeConfig
    from jaxserve.report.logs import log_to_stderr
    from jaxserve.server.main import start_service
    from jaxserve.server.serving import Ending, listen_on, serve

    config = ServeConfig.load(**json.loads(flags[0]), admin_key=(ADMIN,))
    log_to_stderr("warning")
    sock = listen_on("127.0.0.1", 0)
    service = start_service(config)

    def ready(ending: Ending) -> None:
        loop = asyncio.get_running_loop()

        def answer() -> None:
            print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
            for line in sys.stdin:
                if not line.strip():
                    break
                print(json.dumps(left(service.engine, loop)), flush=True)
            loop.call_soon_threadsafe(ending.now)

        threading.Thread(target=answer, daemon=True).start()

    asyncio.run(serve(service, sock, ready))
    service.close()
    service.engine.close()
    return 0


def left(engine: Any, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
    """Return what the engine still holds, and the error of its consistency check, if any."""
    cores, stats = engine._cluster.cores, engine.stats()
    try:
        engine.check()
        wrong = ""
    except AssertionError as error:
        wrong = str(error) or "an assertion failed"
    return {
        "wrong": wrong,
        "pages": sum(core.scheduler.blocks.held for core in cores),
        "requests": len(engine._cluster) + sum(len(core.scheduler) for core in cores) + len(engine._listeners),
        "transferring": len(engine._cluster.kv_transfers),
        "suspended": sum(len(core.executor._suspended) for core in cores),
        "tasks": len(asyncio.all_tasks(engine._loop)) + len(asyncio.all_tasks(loop)),
        "threads": threading.active_count(),
        "rss": resident(),
        "preempted": stats.counters.suspended,
        "dropped": stats.counters.preemptions,
        "demoted": stats.counters.demotions,
        "deflected": stats.deflections,
        "moved": stats.transfers,
        "drafted": stats.counters.drafted,
        "steps": stats.counters.steps,
        "compiled": stats.compilations_after_warmup,
        "rebuilds": stats.counters.rebuilds,
        "healthy": engine.healthy,
    }


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Child:
    """The server process. Writer: the main task."""

    def __init__(self, settings: dict[str, Any]) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(settings)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self._read()["port"])
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the server has ended with status {self._process.wait()}")

    def left(self) -> dict[str, Any]:
        self._say("?\n")
        return self._read()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def end(self) -> int:
        """End the process, and return its exit status; -1 if it had to be killed."""
        if self._process.poll() is None:
            self._say("\n")
        with self._process:  # closes the pipes
            try:
                return self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return -1


# ---- the clients ----


@dataclass
class Tally:
    """Outcomes of the requests. Writer: the clients' event loop."""

    ends: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    turns: Counter[int] = field(default_factory=Counter)  # by status
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB


def body_of(draw: random.Random) -> dict[str, Any]:
    """Draw a request: mostly short prompts, some long, some with a shared prefix."""
    length = min(LENGTH - 80, max(1, int(draw.lognormvariate(3.6, 1.0))))
    shared = [7 + n % 90 for n in range(64)] if draw.random() < 0.3 else []
    prompt = (shared + [draw.randrange(8, 4000) for _ in range(length)])[: LENGTH - 80]
    body: dict[str, Any] = {
        "model": "jaxserve-demo", "prompt": prompt, "max_tokens": draw.randint(1, 64), "stream": True,
        "ignore_eos": True, "temperature": draw.choice([0.0, 0.0, 0.8]), "seed": draw.randrange(1 << 30),
    }  # fmt: skip
    kind = draw.random()
    if kind < 0.15:
        body["service_tier"] = "best_effort"
    elif kind < 0.25:
        body["ttft_slo_ms"] = TIGHT_MS
    return body


async def ask(client: httpx.AsyncClient, body: dict[str, Any], quits: float | None) -> str:
    """Send a request and read its stream, or leave after `quits` events. Returns the outcome."""
    events, reason = 0, ""
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            error = json.loads(await answer.aread())["error"]
            return f"refused {answer.status_code} {error['code']}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return reason or "lost: [DONE] without a reason to finish"
            event = json.loads(line[6:])
            if "error" in event:
                return f"error told: {event['error']['message'][:80]}"
            reason = next((one["finish_reason"] for one in event["choices"] if one["finish_reason"]), reason)
            events += 1
            if quits is not None and events > quits:
                return "cancelled in the middle"
    return "lost: the stream ended before [DONE]"


async def cut(port: int, body: dict[str, Any], after: float) -> str:
    """Send a request, and reset the connection after `after` seconds or some of the answer."""
    raw = json.dumps(body).encode()
    about = "Host: x\r\nContent-Type: application/json\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\n{about}Content-Length: {len(raw)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + raw)
    await writer.drain()
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(300), after)
    writer.transport.abort()
    return "connection cut"


async def one(tally: Tally, client: httpx.AsyncClient, port: int, draw: random.Random) -> None:
    body, fate = body_of(draw), draw.random()
    try:
        if fate < 0.08:
            end = await cut(port, body, draw.expovariate(4.0))
        else:
            end = await ask(client, body, draw.randint(0, 20) if fate < 0.2 else None)
    except (httpx.HTTPError, OSError) as error:
        end = f"lost: {type(error).__name__} {error}"
    tally.ends[end] += 1
    if end.startswith("lost"):
        tally.lost.append(end)


async def capacity(url: str, clients: int, seconds: float) -> float:
    """Measure the requests/s that end when `clients` clients send one request after another."""
    ended, draw, until = 0, random.Random(1), time.monotonic() + seconds

    async def asks() -> None:
        nonlocal ended
        while time.monotonic() < until:
            await ask(client, body_of(draw), None)
            ended += time.monotonic() < until

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(asks() for _ in range(clients)))
    return max(1.0, ended) / seconds


async def turns(tally: Tally, client: httpx.AsyncClient, instances: int, every: float, draw: random.Random) -> None:
    while True:
        await asyncio.sleep(draw.uniform(0.5, 1.5) * every)
        roles, headers = [draw.choice(ROLES) for _ in range(instances)], {"Authorization": f"Bearer {ADMIN}"}
        answer = await client.post("/v1/admin/roles", json={"roles": roles}, headers=headers)
        tally.turns[answer.status_code] += 1


async def memory(tally: Tally, client: httpx.AsyncClient, every: float) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(every)
        page = (await client.get("/metrics")).text.splitlines()
        now = next(float(line.split()[-1]) for line in page if line.startswith("process_resident_memory_bytes"))
        tally.memory.append((time.monotonic() - began, now / 2**20))


async def storm(args: argparse.Namespace, url: str, port: int, rate: float, instances: int) -> Tally:
    """Send requests at `rate` for `--minutes`, and wait until all have ended."""
    tally, draw, until = Tally(), random.Random(args.seed), time.monotonic() + args.minutes * 60
    requests: set[asyncio.Task[None]] = set()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as client:
        beside = [
            asyncio.create_task(turns(tally, client, instances, args.turn_every, draw)),
            asyncio.create_task(memory(tally, client, max(1.0, args.minutes * 60 / 200))),
        ]
        while time.monotonic() < until:
            await asyncio.sleep(draw.expovariate(rate))
            task = asyncio.create_task(one(tally, client, port, draw))
            requests.add(task)
            task.add_done_callback(requests.discard)
        await asyncio.gather(*requests)
        for task in beside:
            failed = task.done()
            task.cancel()
            if failed:
                tally.lost.append(f"lost: {task.exception()!r}")
    return tally


def slope(memory: Sequence[tuple[float, float]]) -> float:
    """Return the growth in MiB per hour over the last two thirds, when caches are full."""
    later = np.array([point for point in memory if point[0] > memory[-1][0] / 3]) if memory else np.zeros((0, 2))
    return float(np.polyfit(later[:, 0], later[:, 1], 1)[0] * 3600) if len(later) > 2 else 0.0


def quiet(server: Child, before: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
    """Return the state of the server once it is idle, or after the timeout."""
    end = time.monotonic() + timeout
    while True:
        found = server.left()
        busy = found["pages"] or found["requests"] or found["suspended"] or found["transferring"]
        if (not busy and found["tasks"] <= before["tasks"]) or time.monotonic() > end:
            return found
        time.sleep(0.5)


def faults(args: argparse.Namespace, tally: Tally, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return a message for every failed check."""
    found = [
        f"{name}: {after[name]} left" for name in ("pages", "requests", "suspended", "transferring") if after[name]
    ]
    found += [f"{after['tasks']} tasks, {before['tasks']} before"] if after["tasks"] > before["tasks"] else []
    found += [after["wrong"]] if after["wrong"] else []
    found += [f"{after['compiled']} programs compiled while serving"] if after["compiled"] else []
    found += [f"{after['rebuilds']} steps raised"] if after["rebuilds"] else []
    found += ["not healthy"] if not after["healthy"] else []
    found += [f"{count} x {end}" for end, count in Counter(tally.lost).items()]
    found += [
        f"{n} x {end}"
        for end, n in tally.ends.items()
        if end.startswith(("error", "refused 4", "refused 500")) and "slo" not in end
    ]
    wrong = {status for status in tally.turns if status not in (200, 400)}
    found += [f"roles answered with {wrong}"] if wrong else []
    grown = slope(tally.memory) * args.minutes / 60
    found += [f"memory grows by {grown:.0f} MiB in {args.minutes:g} minutes"] if grown > args.most_growth else []
    return found


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["--child"]:
        return child(given[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--load", type=float, default=2.0, help="load relative to the server's capacity [%(default)s]")
    parser.add_argument("--mesh", default="3x1")
    parser.add_argument("--policy", default="unified")
    parser.add_argument("--routing", default="auto")
    parser.add_argument("--admission", default="pab")
    parser.add_argument("--preempt-boundary", default="layer")
    parser.add_argument("--speculative-config", help="JSON, as for the server")
    parser.add_argument("--turn-every", type=float, default=5.0, help="seconds between role changes [%(default)s]")
    parser.add_argument("--measure", type=float, default=20.0, help="seconds to measure capacity [%(default)s]")
    parser.add_argument("--most-growth", type=float, default=64.0, help="maximum growth of memory in MiB [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, "soak")
    args = parser.parse_args(given)
    instances = int(args.mesh.split("x")[0])
    settings = {
        "mesh": args.mesh, "policy": args.policy, "routing": args.routing, "admission": args.admission,
        "preempt_boundary": args.preempt_boundary, "max_model_len": LENGTH, "max_num_seqs": ROWS,
        "max_num_batched_tokens": 64, "max_num_queued_reqs": 96, "disable_log_stats": True,
        "kv_cache_memory": f"{instances * 100 * 96}KiB",  # 100 pages of the demo model per instance
        **({"speculative_config": args.speculative_config} if args.speculative_config else {}),
    }  # fmt: skip
    server = Child(settings)
    try:
        sustained = asyncio.run(capacity(server.url, instances * ROWS, args.measure))
        before = quiet(server, {"tasks": 1000})
        print(f"sustains {sustained:.1f} requests/s; {args.load:g} times that for {args.minutes:g} minutes", flush=True)
        tally = asyncio.run(storm(args, server.url, server.port, args.load * sustained, instances))
        after = quiet(server, before)
    finally:
        status = server.end()
    wrong = faults(args, tally, before, after) + ([f"the server ended with {status}"] if status else [])
    print_table("requests", ("outcome", "count"), [(end, str(n)) for end, n in tally.ends.most_common()])
    shown = ("pages", "requests", "transferring", "suspended", "tasks", "threads", "preempted", "dropped", "demoted",
             "deflected", "moved", "drafted", "steps", "compiled")  # fmt: skip
    print_table("server", ("", "before", "after"), [(name, str(before[name]), str(after[name])) for name in shown])
    print(f"roles changed {tally.turns[200]} times; memory {slope(tally.memory):+.1f} MiB per hour")
    print("all checks passed" if not wrong else "FAILED:\n" + "\n".join(wrong))
    save(args, {
        "sustained": sustained, "requests": sum(tally.ends.values()), "ends": dict(tally.ends), "before": before,
        "after": after, "role_changes": tally.turns[200], "roles_refused": tally.turns[400],
        "memory_mib_per_hour": slope(tally.memory), "memory_mib": tally.memory, "wrong": wrong,
    })  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
