"""Streams over HTTP: a server in a child process, and its benchmark client in another."""

from __future__ import annotations

from benchmarks import common
from jaxserve.demo import model_path

from . import engine
from .environment import cache, prepare
from .part import Run

DEMO = "demo"
STREAMS = (256, 64)
POOL = 16 << 30  # bytes: 128K tokens of the 8B model
PROMPT, OUTPUT = 128, 128  # tokens
IDS = "16:4000"  # token ids of prompts
FIGURES = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "failed")


def measure(run: Run, model: str) -> None:
    """Fill the table `http` at each number of streams. model: DEMO with its weights, or another with random ones."""
    prepare(run)
    streams = (2,) if run.dry else STREAMS
    with common.server(_flags(run, model, max(streams)), cache=cache(run), timeout=run.left()) as server:
        for count in streams:
            found = common.bench(server.url, _load(count, 8 if run.dry else PROMPT, 8 if run.dry else OUTPUT))
            run.row("http", model=model, streams=count, **{name: found[name] for name in FIGURES})
    run.row("start", mesh=f"1x1, {model} over HTTP", seconds=server.seconds)


def _flags(run: Run, model: str, rows: int) -> list[str]:
    """Return the server's flags."""
    random = run.dry or model != DEMO
    source = [engine.name_of(run), "--load-format", "dummy"] if random else [str(model_path())]
    length, tokens, pool = (64, 64, engine.SMALL) if run.dry else (1024, 2048, POOL)
    sizes = {
        "--max-num-seqs": rows, "--max-num-batched-tokens": tokens, "--max-model-len": length,
        "--kv-cache-memory": pool, "--profile-time": 0.2 if run.dry else 5,
        "--preempt-boundary": "chunk",  # fewer programs: no prompt is long enough to be stopped
    }  # fmt: skip
    flags = (str(word) for pair in sizes.items() for word in pair)
    return ["--model", *source, "--tokenizer", str(model_path()), "--mesh", "1x1", *flags]


def _load(streams: int, prompt: int, output: int) -> list[str]:
    """Return the client's flags: `streams` calls at a time, twice as many in all."""
    return [
        *("--dataset-name", "random", "--random-ids", IDS, "--random-input-len", str(prompt)),
        *("--random-output-len", str(output), "--num-prompts", str(2 * streams), "--max-concurrency", str(streams)),
        *("--client", "http", "--num-warmups", "2", "--ignore-eos"),
    ]
