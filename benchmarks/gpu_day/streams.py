"""Streams over HTTP: a server in a child process, and its benchmark client in another."""

from __future__ import annotations

from benchmarks import common
from jaxserve.demo import model_path

from . import engine, serving
from .environment import cache, prepare
from .part import Run

DEMO = "demo"
STREAMS = (256, 64)
PROMPT, OUTPUT = 128, 96  # tokens; the pool holds those of all streams
LENGTH = 1024  # max_model_len of the demo model
IDS = "16:4000"  # token ids of prompts
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "failed")


def measure(run: Run, model: str) -> None:
    """Fill the table `http` at each number of streams. model: DEMO with its weights, or another with random ones."""
    prepare(run)
    streams = (2,) if run.dry else STREAMS
    with common.server(_flags(run, model), cache=cache(run), timeout=run.left()) as server:
        for count in streams:
            found = common.bench(server.url, _load(count, 8 if run.dry else PROMPT, 8 if run.dry else OUTPUT))
            run.row("http", model=model, streams=count, **{name: found[name] for name in FIGURES})
    run.row("start", mesh=f"1x1, {model} over HTTP", seconds=server.seconds)


def _flags(run: Run, model: str) -> list[str]:
    """Return the server's flags: the sizes of the other served parts, so that their programs are loaded."""
    random = run.dry or model != DEMO
    source = [engine.name_of(run), "--load-format", "dummy"] if random else [str(model_path())]
    sizes = {"kv_cache_memory": engine.SMALL if run.dry else serving.POOL, **serving.sizes(run)}
    if not random:
        sizes["max_model_len"] = LENGTH
    flags = (word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value)))
    return ["--model", *source, "--tokenizer", str(model_path()), "--mesh", "1x1", *flags]


def _load(streams: int, prompt: int, output: int) -> list[str]:
    """Return the client's flags: `streams` calls at a time, twice as many in all."""
    return [
        *("--dataset-name", "random", "--random-ids", IDS, "--random-input-len", str(prompt)),
        *("--random-output-len", str(output), "--num-prompts", str(2 * streams), "--max-concurrency", str(streams)),
        *("--client", "http", "--num-warmups", "2", "--ignore-eos"),
    ]
