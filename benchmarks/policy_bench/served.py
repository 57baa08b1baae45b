"""Serve a model over HTTP under one policy after another, compiled once, and read the journal of each run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from engine_bench.folders import without_weights

from jaxserve.bench.drive import Run
from jaxserve.bench.load import Call
from jaxserve.cli.replay import perf_of
from jaxserve.config import ServeConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.runtime.info import Stats
from jaxserve.engine.startup.assemble import assemble
from jaxserve.sched.api.request import Request
from jaxserve.sched.cluster.ttft_predictions import TTFTPredictions
from jaxserve.sched.journal import Replay, replay
from jaxserve.server.service import Service
from jaxserve.server.serving import Ending, listen_on, serve
from jaxserve.tokenizer import Tokenizer

from .client import send
from .mixes import Scale
from .systems import MODELS, System

LONGEST = 600.0  # timeout of a case in seconds


class Recorded(TTFTPredictions):
    """TTFT predictions that also keep (path, last predicted, measured), in seconds, except for best effort.

    Writer: the engine's thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, float, float]] = []

    def over(self, request: Request) -> None:
        pair = self.of(request)
        if pair is not None:
            self.pairs.append((self._open[request.id].path, *pair))
        super().over(request)


@dataclass
class Served:
    """One policy's run of a mix."""

    run: Run
    journal: Replay
    stats: Stats
    first_tokens: list[tuple[str, float, float]] = field(default_factory=list)  # path, predicted, measured


class Host:
    """Warm executors of one model, on which one policy serves at a time."""

    def __init__(self, name: str, mesh: str, folder: Path, **settings: Any) -> None:
        """Load and compile the model `name`. folder: for files of the runs. settings: further ServeConfig fields."""
        self.model, self._folder = MODELS[name], folder
        source = None if self.model.config is None else str(without_weights(folder / name, self.model.config))
        self.config = ServeConfig(
            model=source, load_format="auto" if source is None else "dummy", served_model_name=(name,), mesh=mesh,
            max_model_len=self.model.length, max_num_seqs=self.model.rows, max_num_batched_tokens=self.model.chunk,
            kv_cache_memory=1 << 30, disable_log_stats=True, log_level="warning", **settings,
        )  # fmt: skip
        self.machine = assemble(self.config, lambda *told: None)
        self._tokenizer = Tokenizer.load(self.config.model_source)
        weights = self.machine.executors[0].state.weights
        self.layers = len(weights["layers"])
        self.parameters = _parameters(weights)

    def serve(self, system: System, calls: Sequence[Call], tiers: Scale | None, clients: Executor) -> Served:
        """Serve every call at its time. Raises RuntimeError if requests are unfinished after LONGEST seconds."""
        journal = self._folder / "journal.jsonl"
        mine = replace(self.config, policy=system.policy, mode=system.mode, journal=str(journal))  # type: ignore[arg-type]
        if tiers is not None:
            mine = replace(mine, slo_tiers=str(_tiers(self._folder / "tiers.yaml", tiers)))
        engine = Engine.on(self.machine.serving(mine))
        recorded = engine._cluster.ttft_predictions = Recorded()
        try:
            with _listening(Service(engine, self._tokenizer, mine)) as url:
                sent = clients.submit(send, url, mine.names[0], calls, tiers is not None)
                try:
                    run = sent.result(LONGEST)
                except TimeoutError:
                    raise RuntimeError(f"{system}: unfinished after {LONGEST:.0f} s: {engine.stats()}") from None
            stats = _at_rest(engine)
            engine.check()
        finally:
            engine.close()
        with journal.open(encoding="utf-8") as lines:
            replayed = replay(lines, perf_of)
        return Served(run, replayed, stats, recorded.pairs)


def _at_rest(engine: Engine) -> Stats:
    """Return the engine's statistics once all planned-ahead rows and KV transfers have ended."""
    end = time.monotonic() + 30.0
    while (stats := engine.stats()).running or stats.waiting or stats.transferring:
        if time.monotonic() > end:
            raise RuntimeError(f"the engine is still busy after 30 s: {stats}")
        time.sleep(0.02)
    return stats


@contextmanager
def _listening(service: Service) -> Iterator[str]:
    """Run a server in a thread of this process, and yield its URL."""
    sock, ready, kept = listen_on("127.0.0.1", 0), threading.Event(), list[tuple[Ending, Any]]()

    def started(ending: Ending) -> None:
        kept.append((ending, asyncio.get_running_loop()))
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve(service, sock, started)), daemon=True)
    thread.start()
    if not ready.wait(30):
        raise RuntimeError("the server did not come up in 30 s")
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        (ending, loop) = kept[0]
        loop.call_soon_threadsafe(ending.now)
        thread.join(30)
        sock.close()
        service.close()


def _tiers(path: Path, scale: Scale) -> Path:
    tiers = {one.name: {"ttft": f"{one.ttft}s", "tpot": f"{one.tpot}s"} for one in scale.shapes}
    path.write_text(yaml.safe_dump({"tiers": tiers}), encoding="utf-8")
    return path


def _parameters(weights: Any) -> int:
    import jax

    return sum(leaf.size for leaf in jax.tree.leaves(weights))
