#!/usr/bin/env python3
"""What a front's routers cost: the time to choose one of many instances, and what a report takes and weighs.

Instances are mixed, with random prompts that wait and decodes that run. Between two choices some instances report.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import common
import numpy as np
from scheduler_cost import Full

from jaxserve.fleet.reports import Feed, InstanceReport, Receiver
from jaxserve.report.table import print_table
from jaxserve.sched import routing
from jaxserve.sched.api.policy import Role
from jaxserve.sched.routing import ROUTERS
from jaxserve.sched.routing.front import SHORTLIST, Front
from jaxserve.sched.routing.snapshot import Snapshot

NOW = 0.2  # seconds on the clock of the instances


def filled(decodes: int) -> Full:
    """Return instances that each run `decodes` decodes, of which some have prompts waiting."""
    full = Full([Role.MIXED] * 32, decodes)
    for one in full.instances:
        for _ in range(int(full.random.integers(0, 4))):
            one.add(full.request())
    return full


def decide(args: argparse.Namespace, name: str, instances: int, full: Full) -> dict[str, Any]:
    """Return the milliseconds to choose an instance and count the request there."""
    front = Front(routing.make(name), [1] * instances, page_size=16, shortlist=args.shortlist)
    taken = [Snapshot.of(one, NOW, identify=False) for one in full.instances]
    for index in range(instances):
        front.update(index, {index: taken[index % len(taken)]}, -1)
        front.caches(index, [bytes([index % 256]) * 8], ())
    spent = []
    for mark in range(args.requests):
        request = full.request()
        for index in full.random.integers(0, instances, 4).tolist():
            front.update(index, {index: taken[int(full.random.integers(len(taken)))]}, mark - 1)
        began = time.perf_counter()
        index = front.choose(request, NOW)
        assert index is not None
        front.sent(index, request, mark)
        spent.append(1e3 * (time.perf_counter() - began))
    p50, p99 = np.percentile(spent, (50, 99)).tolist()
    return {"router": name, "instances": instances, "p50_ms": p50, "p99_ms": p99}


def report(decodes: int) -> dict[str, Any]:
    """Return the bytes of a report, and the milliseconds to write and to read it."""
    import msgspec

    full = filled(decodes)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(InstanceReport)
    receiver = Receiver([full.instances[0].limits] * len(full.instances))
    sizes, write, read, table = [], [], [], []
    front = Front(routing.make("unified"), [1] * len(full.instances))
    for index, one in enumerate(full.instances):
        feed = Feed(index, one)
        receiver.read([feed.whole(NOW)])
        feed.follow(True)
        feed.news(NOW)  # with the step-time model, which does not change here
        one.counters.steps += 1
        began = time.perf_counter()
        news = feed.news(NOW)
        assert news is not None
        frame = encoder.encode(news)
        write.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        [update] = receiver.read([decoder.decode(frame)]).values()
        read.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        front.update(index, {index: update.snapshot.later(0.1)}, -1)
        table.append(1e3 * (time.perf_counter() - began))
        sizes.append(len(frame))
    medians = [float(np.median(one)) for one in (sizes, write, read, table)]
    return {"decodes": decodes, **dict(zip(("bytes", "write_ms", "read_ms", "use_ms"), medians, strict=True))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", nargs="+", default=sorted(ROUTERS))
    parser.add_argument("--instances", nargs="+", type=int, default=[8, 64, 512, 1000])
    parser.add_argument("--decodes", type=int, default=32, help="running decodes of an instance")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--shortlist", type=int, default=SHORTLIST, help="instances that a router looks at")
    common.add_output(parser, "routers")
    args = parser.parse_args()
    gc.freeze()
    gc.disable()
    full = filled(args.decodes)
    rows = [decide(args, name, count, full) for name in args.routers for count in args.instances]
    cells = {(row["router"], row["instances"]): f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}" for row in rows}
    table = [[name, *(cells[name, count] for count in args.instances)] for name in args.routers]
    print_table("decide, ms: p50 / p99, by instances", ["router", *map(str, args.instances)], table)
    reports = [report(decodes) for decodes in (8, 32, 128)]
    print_table("a report", list(reports[0]), [[f"{value:.3g}" for value in row.values()] for row in reports])
    common.save(args, {"rows": rows, "reports": reports})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
