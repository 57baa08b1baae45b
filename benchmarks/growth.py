#!/usr/bin/env python3
"""What routing costs a front as a fleet grows: CPU time and memory by replicas, requests in flight and cached pages.

One of the three grows at a time. Every replica has one instance. Prompts have 2,048 tokens, and the first half of each
is in the prefix caches of a few replicas. CPU times are means; memory is what Python allocates, by tracemalloc.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import common
import msgspec
import numpy as np
from scheduler_cost import Full

from jaxserve.remote.reports import Feed, InstanceReport, Receiver
from jaxserve.report.table import print_table
from jaxserve.sched import routing
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import SLO
from jaxserve.sched.instance.block_pool import next_digest
from jaxserve.sched.instance.scheduler import Scheduler
from jaxserve.sched.routing.front import Front
from jaxserve.sched.routing.prefix_index import KEPT

NOW = 0.2  # seconds on the clock of the instances
PAGE = 16
PREFIX = 1024  # tokens that requests of a set share
PROMPT = 2048
SET = PREFIX // PAGE  # pages
HOLDERS = 4  # replicas that have a set in their caches
STATES = 32  # different states of instances
HEADS = ("route, µs", "report, µs", "lost, ms", "memory, MB")


class Row(NamedTuple):
    """What a front pays at one size of a fleet."""

    grown: str
    replicas: int
    in_flight: int
    pages: int
    route_us: float  # to choose the instance of a request and to count the request there
    report_us: float  # to read the report of an instance and to use it
    lost_ms: float  # to forget a replica
    memory: int  # bytes, of reports, caches and all


class Fleet:
    """A front, and reports of instances that have `in_flight` requests. Writer: itself."""

    def __init__(self, router: str, replicas: int, in_flight: int, pages: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._ids = count()
        self._sets = max(1, pages // SET)
        instances = Full([Role.MIXED] * STATES, in_flight // replicas).instances
        self._frames = reports(replicas, instances)
        self._known = [self._digests(at) for at in range(self._sets)]
        before = tracemalloc.get_traced_memory()[0]
        self._front = Front(routing.make(router), [1] * replicas, PAGE)
        self._receiver = Receiver([instances[0].limits] * replicas)
        self._decoder = msgspec.msgpack.Decoder(InstanceReport)
        holders = self._random.integers(0, replicas, (self._sets, HOLDERS))
        self._holder = int(holders[0, 0])
        for at, digests in enumerate(self._known):
            for index in set(holders[at].tolist()):
                self._front.caches(index, [bytes(bytearray(one)) for one in digests], ())  # as from a message
        for index in range(replicas):
            self.report(index, -1)
        self.memory = tracemalloc.get_traced_memory()[0] - before

    def _digests(self, at: int) -> list[bytes]:
        request = self.request(at)
        return [next_digest(request, PAGE)[:KEPT] for _ in range(SET)]

    def request(self, at: int) -> Request:
        """Return a new request of a set."""
        prompt = range(at * PROMPT, (at + 1) * PROMPT)
        return Request(next(self._ids), prompt, SamplingParams(max_tokens=100), SLO(1.0, 0.05), NOW)

    def drawn(self) -> Request:
        return self.request(int(self._random.integers(self._sets)))

    def route(self, request: Request, mark: int) -> None:
        index = self._front.choose(request, NOW)
        assert index is not None
        self._front.sent(index, request, mark)

    def report(self, index: int, mark: int) -> None:
        [update] = self._receiver.read([self._decoder.decode(self._frames[index])]).values()
        self._front.caches(index, update.gained, update.lost, update.anew)
        self._front.update(index, {index: update.snapshot}, mark)

    def forget(self) -> None:
        """Lose a replica that has the first set in its cache."""
        self._front.forget(self._holder)


def reports(replicas: int, instances: Sequence[Scheduler]) -> list[bytes]:
    """Return a report of each replica as a message; their states repeat those of a few instances."""
    feeds = (Feed(index, instances[index % len(instances)]) for index in range(replicas))
    return [msgspec.msgpack.encode(feed.whole(NOW, cache=False)) for feed in feeds]


def measure(args: argparse.Namespace, grown: str, replicas: int, in_flight: int, pages: int) -> Row:
    tracemalloc.start()
    memory = Fleet(args.router, replicas, in_flight, pages).memory
    tracemalloc.stop()
    gc.collect()
    fleet = Fleet(args.router, replicas, in_flight, pages)
    requests = [fleet.drawn() for _ in range(args.requests)]
    turns = np.random.default_rng(1).integers(0, replicas, (args.requests, args.reports)).tolist()
    route = report = 0.0
    for mark, (request, turn) in enumerate(zip(requests, turns, strict=True)):
        began = time.process_time()
        fleet.route(request, mark)
        routed = time.process_time()
        for index in turn:
            fleet.report(index, mark)
        route, report = route + routed - began, report + time.process_time() - routed
    route_us, report_us = 1e6 * route / args.requests, 1e6 * report / (args.requests * args.reports)
    began = time.process_time()
    fleet.forget()
    lost_ms = 1e3 * (time.process_time() - began)
    return Row(grown, replicas, in_flight, pages, route_us, report_us, lost_ms, memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", default="unified")
    parser.add_argument("--replicas", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[100, 1000, 10_000], help="requests in the fleet")
    parser.add_argument("--pages", nargs="+", type=int, default=[1000, 10_000, 100_000, 1_000_000], help="different")
    parser.add_argument("--base", nargs=3, type=int, default=[100, 1000, 10_000], help="what does not grow, likewise")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--reports", type=int, default=10, help="per request: 2 requests/s and 20 reports/s a replica")
    common.add_output(parser, "growth")
    args = parser.parse_args()
    gc.disable()
    base = dict(zip(("replicas", "in_flight", "pages"), args.base, strict=True))
    Fleet(args.router, *args.base)  # what is imported and kept at the first use belongs to no size
    rows = []
    for grown in base:
        for size in getattr(args, grown):
            rows.append(measure(args, grown, **{**base, grown: size}))
            print(*rows[-1], flush=True)
    table = [
        [row.grown.replace("_", " "), f"{getattr(row, row.grown):,}", f"{row.route_us:.0f}", f"{row.report_us:.0f}",
         f"{row.lost_ms:.2f}", f"{row.memory / 1e6:.2f}"]
        for row in rows
    ]  # fmt: skip
    print_table(f"a front with {args.router}; others stay at {base}", ["grows", "to", *HEADS], table)
    common.save(args, {"rows": [row._asdict() for row in rows]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
