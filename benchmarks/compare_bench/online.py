"""Servers beside one another: each side's OpenAI endpoint under the same open-loop load.

Every side gets the same prompts (random token ids), arrival times (Poisson) and request bodies, and is judged by the
same objectives. `jaxserve bench` sends and times them. Servers take turns: one that waits is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import numpy as np

from jaxserve.bench.client import Outcome, Target, open_sender
from jaxserve.bench.drive import Run, drive
from jaxserve.bench.load import Call, Objective, arrivals, schedule, words
from jaxserve.bench.result import Goals, errors, samples
from jaxserve.report.table import print_table

from . import gguf_file
from .sides import environment_of

COMMANDS = {  # what follows the interpreter; the model's folder comes next
    "jaxserve": ["-m", "jaxserve.run", "--model"],
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--model"],
}
BINARIES = ("llamacpp",)  # sides whose server is a program of its own: --server
SLOTS, SLOT_TOKENS = 32, 1024  # of llama.cpp: requests at once, and the context of each
ENVIRONMENT = {
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    # ggml has a barrier after every operation. A decode step takes 20 to 40 % longer where threads sleep there, and
    # ten times as long with GNU OpenMP's default of 300000 spins while another process has a core.
    "llamacpp": {"GOMP_SPINCOUNT": "3000"},
}
RATE_FACTORS = {"demo": 8.0}  # of --rates, which suit the Llama: the demo model is that much faster
WARMUP_SEED = 1_000_003  # prompts that no measured round has


@dataclass(frozen=True)
class LoadClass:
    """Requests of one kind: tokens from the first to the second number, objectives in seconds."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    ttft: float
    tpot: float

    def calls(self, count: int, scale: float, vocabulary: Sequence[int], rng: np.random.Generator) -> list[Call]:
        """`count` requests with their objectives times `scale`; `at` is 0."""
        slo = Objective(1e3 * scale * self.ttft, 1e3 * scale * self.tpot, self.name)
        prompts = rng.integers(self.prompt[0], self.prompt[1] + 1, count)
        outputs = rng.integers(self.output[0], self.output[1] + 1, count)
        return [
            Call(0.0, words(int(n), vocabulary, rng), int(n), int(m), slo)
            for n, m in zip(prompts, outputs, strict=True)
        ]


CLASSES = (
    LoadClass("chat", (32, 128), (32, 64), 0.5, 0.060),
    LoadClass("documents", (256, 512), (16, 32), 8.0, 0.200),
)


def mixed(count: int, rate: float, seed: int, scale: float, vocabulary: Sequence[int]) -> list[Call]:
    """`count` requests, as many of each class, in random order, at Poisson times of `rate` per second."""
    rng = np.random.default_rng([seed, 2])
    each = -(-count // len(CLASSES))
    calls = [call for one in CLASSES for call in one.calls(each, scale, vocabulary, rng)]
    shuffled = [calls[i] for i in rng.permutation(len(calls))]
    return schedule(shuffled, arrivals(len(shuffled), rate, 1.0, seed))


async def send(url: str, model: str, calls: Sequence[Call]) -> Run:
    """Send all calls at their times, greedy and with outputs of just their length."""
    async with open_sender("http", Target(url, model, ignore_eos=True)) as sender:
        return await drive(calls, sender)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Percentiles in ms of the requests that succeeded; attainment as a share of those sent."""
    kept = [all(Goals().kept(one).values()) for one in outcomes]
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": sum(not one.ok for one in outcomes),
        "output_tokens": sum(one.output_tokens for one in outcomes if one.ok),
        "attained": sum(kept) / len(kept),
    }
    for metric in ("ttft", "tpot"):
        values = samples(outcomes, metric)
        for percentile in (50, 99):
            found[f"{metric}_p{percentile}_ms"] = float(np.percentile(values, percentile)) if values else None
    return found


def by_class(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Figures of each class, and of all."""
    parts = {one.name: [o for o in outcomes if o.call.slo.name == one.name] for one in CLASSES}
    return [{"class": name, **figures(part)} for name, part in {**parts, "all": outcomes}.items()]


def process_tree(root: int) -> list[int]:
    """Ids of a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return found


def peak_memory(root: int) -> int:
    """Peak RSS of each process of a tree, added up; bytes. Pages that they share count in each."""
    total = 0
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total


class OnlineSide:
    """A server of one engine, which is stopped (SIGSTOP) except while it is sent something."""

    def __init__(self, name: str, model: str, servers: Sequence[common.Server]) -> None:
        """`servers`: its starts so far; the last one is up."""
        self.name = name
        self.start = [one.seconds for one in servers]
        self.memory = 0  # bytes
        self._model = model
        self._server = servers[-1]

    def signal(self, number: int) -> None:
        os.killpg(self._server.pid, number)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Send the calls. Raises RuntimeError where an output has another length than it asked for."""
        self.signal(signal.SIGCONT)
        outcomes = asyncio.run(send(self._server.url, self._model, calls)).outcomes
        self.memory = peak_memory(self._server.pid)
        self.signal(signal.SIGSTOP)
        for line in errors(outcomes):
            print(f"{self.name}: {line}")
        if wrong := [one for one in outcomes if one.ok and one.output_tokens != one.call.output_tokens]:
            asked = wrong[0].call.output_tokens
            raise RuntimeError(f"{self.name} gave {wrong[0].output_tokens} tokens where {asked} were asked for")
        return list(outcomes)


def llama_server(program: str, model: Path, threads: int) -> list[str]:
    """The command of llama.cpp's server: float32 KV cache, and no reuse of prompts."""
    flags = {"--model": model, "--threads": threads, "--parallel": SLOTS, "--ctx-size": SLOTS * SLOT_TOKENS}
    flags |= {"--cache-type-k": "f32", "--cache-type-v": "f32", "--cache-ram": 0}
    return [program, *(str(part) for pair in flags.items() for part in pair), "--no-cache-prompt", "--offline"]


def command_of(name: str, folder: Path, args: argparse.Namespace, stack: ExitStack) -> list[str]:
    """The command of a side's server; files that it reads last until `stack` ends.

    Raises RuntimeError where the side has no server, ValueError where the model cannot be written for it.
    """
    if name in COMMANDS:
        return [args.python.get(name) or sys.executable, *COMMANDS[name], str(folder)]
    if name not in BINARIES:
        raise RuntimeError("no server that takes prompts of token ids")
    if name not in args.server:
        raise RuntimeError(f"--server {name}=FILE is missing")
    room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return llama_server(args.server[name], gguf_file.write(folder, room / "model.gguf"), args.threads)


def start(name: str, folder: Path, args: argparse.Namespace, stack: ExitStack) -> OnlineSide:
    """Start a side `--starts` times and leave the last server up until `stack` ends.

    Raises RuntimeError, ValueError or OSError that ends with a line that says why it cannot serve.
    """
    command = command_of(name, folder, args, stack)
    environment = environment_of(name, args.threads) | ENVIRONMENT.get(name, {})
    servers = []
    for number in range(args.starts):
        own = stack.enter_context(ExitStack())
        servers.append(own.enter_context(common.launched(command, environment)))
        if number + 1 < args.starts:
            own.close()
    side = OnlineSide(name, str(folder), servers)
    stack.callback(side.signal, signal.SIGCONT)  # a stopped process does not act on SIGTERM
    side.signal(signal.SIGSTOP)
    return side


def started(folder: Path, args: argparse.Namespace, stack: ExitStack) -> tuple[list[OnlineSide], dict[str, str]]:
    """All sides that start, and why others do not, by name. Raises RuntimeError where none does."""
    sides: list[OnlineSide] = []
    left_out: dict[str, str] = {}
    for name in args.sides:
        try:
            sides.append(start(name, folder, args, stack))
        except (RuntimeError, ValueError, OSError) as error:
            # Where a program lies is not part of the result.
            program = args.server.get(name) or args.python.get(name) or sys.executable
            left_out[name] = str(error).strip().splitlines()[-1].replace(program, Path(program).name)
            print(f"{name} is left out: {left_out[name]}")
    if not sides:
        raise RuntimeError(f"no side starts: {left_out}")
    return sides, left_out


def measured(sides: Sequence[OnlineSide], rate: float, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one rate: all sides in turns, `--repeats` times, the outcomes of a side together."""
    pooled: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    for repeat in range(args.repeats):
        # A seed of its own for each rate and repeat: no prefix cache knows the prompts.
        calls = mixed(round(rate * args.duration), rate, 1000 * number + repeat, args.slo_scale, args.vocabulary)
        first = repeat % len(sides)  # no side is always the one that goes first
        for side in (*sides[first:], *sides[:first]):
            pooled[side.name] += side.run(calls)
    return [{"rate": rate, "side": name, **row} for name, outcomes in pooled.items() for row in by_class(outcomes)]


def compared(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one model, as JSON. Raises RuntimeError where no side starts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    args = argparse.Namespace(**{**vars(args), "vocabulary": range(16, config["vocab_size"])})  # the first are special
    rates = [rate * RATE_FACTORS.get(name, 1.0) for rate in args.rates]
    with ExitStack() as stack:
        sides, left_out = started(folder, args, stack)
        for side in sides:
            side.run(mixed(args.warmups, float("inf"), WARMUP_SEED, args.slo_scale, args.vocabulary))
        rows = [row for number, rate in enumerate(rates) for row in measured(sides, rate, number, args)]
        ends = {side.name: {"start_s": side.start, "memory": side.memory} for side in sides}
    return {"model": name, "online": rows, "servers": ends, "left_out": left_out}


def show(found: Mapping[str, Any]) -> None:
    """A table for each rate, and one of the servers."""
    names = ["ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms"]
    for rate in dict.fromkeys(row["rate"] for row in found["online"]):
        rows = [
            [row["side"], row["class"], row["requests"], row["failed"], *(row[name] for name in names), row["attained"]]
            for row in found["online"]
            if row["rate"] == rate
        ]
        heads = ["side", "class", "requests", "failed", *(name.replace("_", " ") for name in names), "attained"]
        print_table(f"{found['model']}, {rate:g} requests/s", heads, rows)
    servers = [
        [name, ", ".join(f"{seconds:.1f}" for seconds in one["start_s"]), one["memory"] / 1e9]
        for name, one in found["servers"].items()
    ]
    print_table(found["model"], ["side", "starts, s", "peak RSS, GB"], servers)
