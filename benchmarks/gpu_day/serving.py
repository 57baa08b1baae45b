"""The served engine: idle time between its steps, goodput of policies on real steps, and streams over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks import common
from benchmarks.engine_bench.gaps import gaps
from benchmarks.policy_bench.mixes import MIXES, Scale, arrivals, calls, scaled
from benchmarks.policy_bench.systems import System
from jaxserve.config import ServeConfig, parse_mesh
from jaxserve.engine.startup.assemble import Machine, assemble
from jaxserve.engine.startup.warmup import compile_counter
from jaxserve.sched.api.request import Request
from jaxserve.sched.api.slo import NO_SLO
from jaxserve.sched.metrics import measure, summarize
from jaxserve.sched.sim import Arrival

from . import engine
from .environment import prepare
from .part import Run

POOL = 8 << 30  # bytes of an instance's pool: 64K tokens of the 8B model
SIZES: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 8192}
DRY: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "profile_time": 0.2,
    "preempt_boundary": "chunk",
}
PLAIN = "vllm"
SYSTEMS = ("unified", "distserve", PLAIN)
LOADS = (0.8, 0.5, 1.1)  # shares of the capacity that the profile predicts
REQUESTS = 60
MARGIN = 25.0  # seconds that another run of requests may need


def sizes(run: Run) -> dict[str, Any]:
    """Return the settings on which the programs of all served parts depend."""
    return DRY if run.dry else SIZES


def config_of(run: Run, mesh: str) -> ServeConfig:
    """Return the settings of a server of the model. Instances of one device have the same programs in every mesh."""
    instances, _ = parse_mesh(mesh)
    pool = engine.SMALL if run.dry else POOL
    return ServeConfig(
        model=engine.name_of(run), load_format="dummy", mesh=mesh, share_devices=True,
        kv_cache_memory=instances * pool, enable_prefix_caching=False, disable_log_stats=True, log_level="warning",
        **sizes(run),
    )  # fmt: skip


@contextmanager
def machine_of(run: Run, mesh: str) -> Iterator[Machine]:
    """Assemble a warm machine, and fill a row of the table `start`."""
    machine = assemble(config_of(run, mesh), lambda *told: None)
    counter = compile_counter()
    run.row(
        "start", mesh=mesh, instances=len(machine.executors), seconds=machine.info.startup_seconds,
        compiled=counter.compilations_total, loaded=counter.cache_loads_total, attention=machine.info.attention,
    )  # fmt: skip
    try:
        yield machine
    finally:
        asyncio.run(machine.close())


def serve(machine: Machine, arrivals: Sequence[Arrival]) -> list[Request]:
    """Serve every arrival at its time, and return the ended requests."""

    async def serving() -> list[Request]:
        over: list[Request] = []
        async with common.clustered(machine, over) as cluster:
            await common.submit(cluster, machine.now, arrivals)
        return over

    return asyncio.run(serving())


def idle(run: Run) -> None:
    """Fill the table `idle`: full decode batches under a scheduler, and the gaps between their steps."""
    prepare(run)
    batches, prompt, tokens = ((4,), 16, 24) if run.dry else ((64, 256), 128, 96)
    with machine_of(run, "1x1") as machine:
        for rows in batches:
            journal = run.folder / f"idle-{rows}.jsonl"
            mine = machine.serving(replace(machine.config, policy=PLAIN, journal=str(journal)))
            began = mine.now()
            over = serve(mine, [Arrival(0.0, prompt, tokens, NO_SLO)] * rows)
            asyncio.run(mine.close())
            taken = max(one.token_times[-1] for one in over) - began
            lines = journal.read_text(encoding="utf-8").splitlines()
            journal.unlink()  # megabytes that no report shows
            run.row("idle", rows=rows, tokens_s=rows * tokens / taken, **gaps(lines, began, rows))


def goodput(run: Run) -> None:
    """Fill the table `goodput`: policies on two instances that share the device, with objectives of measured steps."""
    prepare(run)
    count, loads = (6, LOADS[:1]) if run.dry else (REQUESTS, LOADS)
    mix = MIXES["chat"]
    with machine_of(run, "2x1") as machine:
        chunk, length = machine.limits.tokens, machine.info.max_model_len
        # The two share one device, so together they have the capacity of one.
        scales = [scaled(mix, machine.recipe.make().step_time, chunk, 1, load) for load in loads]
        for one in scales[0].shapes:
            run.row(
                "goodput tasks", task=one.name, prompt=one.prompt, output=one.output, ttft_ms=1e3 * one.ttft,
                tpot_ms=1e3 * one.tpot,
            )  # fmt: skip
        for load, scale in zip(loads, scales, strict=True):
            made = arrivals(calls(mix, scale, count, 0, length))
            for policy in SYSTEMS:
                if run.left() < MARGIN and not run.dry:
                    run.row("goodput", load=load, policy=policy, skipped="no time left")
                else:
                    run.row("goodput", load=load, policy=policy, **_attained(machine, policy, made, scale))


def _attained(machine: Machine, policy: str, made: Sequence[Arrival], scale: Scale) -> dict[str, Any]:
    system = System.parse(policy)
    mine = machine.serving(replace(machine.config, policy=system.policy, mode=system.mode))  # type: ignore[arg-type]
    over = serve(mine, made)
    whole = summarize([measure(one, made[one.id].class_) for one in over])
    return {
        "roles": "mixed" if system.mixed else "split",
        "requests": whole.count,
        "rate": scale.rate,
        "attained": whole.attained,
        "ttft_attained": whole.ttft_attained,
        "tpot_attained": whole.tpot_attained,
        "goodput_req_s": whole.request_goodput,
        "tokens_s": whole.output_throughput,
        "ttft_p50_ms": 1e3 * whole.ttft.p50,
        "ttft_p99_ms": 1e3 * whole.ttft.p99,
        "tpot_p50_ms": 1e3 * whole.tpot.p50,
    }
