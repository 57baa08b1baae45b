"""Compare OpenAI servers under the same open-loop load.

Every side gets the same prompts (random token ids), arrival times (Poisson) and request bodies, and is judged by the
same objectives. The client of `jaxserve bench` sends and times the requests. Servers take turns; those that are not
being measured are stopped.
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

COMMANDS = {  # arguments between the interpreter and the model's folder
    "jaxserve": ["-m", "jaxserve.run", "--model"],
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--dtype", "float32", "--model"],
}
BINARIES = ("llamacpp",)  # sides with a native server program: --server
SLOTS, SLOT_TOKENS = 32, 1024  # llama.cpp: concurrent requests, and the context length of each
ENVIRONMENT = {
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    # ggml has a barrier after every operation. A decode step takes 20 to 40 % longer if threads sleep there, and ten
    # times as long with GNU OpenMP's default of 300000 spins while another process occupies a core.
    "llamacpp": {"GOMP_SPINCOUNT": "3000"},
}
RATE_FACTORS = {"demo": 8.0}  # multiplies --rates, which are chosen for the Llama; the demo model is this much faster
WARMUP_SEED = 1_000_003  # no measured round uses this seed, so warm-up prompts are never sent again


@dataclass(frozen=True)
class LoadClass:
    """A class of requests: ranges of prompt and output tokens (inclusive), and objectives in seconds."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]
    ttft: float
    tpot: float

    def calls(self, count: int, scale: float, vocabulary: Sequence[int], rng: np.random.Generator) -> list[Call]:
        """Return `count` requests with `at` 0 and objectives multiplied by `scale`."""
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
    """Return about `count` requests, equally many per class, shuffled, at Poisson times of `rate` per second."""
    rng = np.random.default_rng([seed, 2])
    each = -(-count // len(CLASSES))
    calls = [call for one in CLASSES for call in one.calls(each, scale, vocabulary, rng)]
    shuffled = [calls[i] for i in rng.permutation(len(calls))]
    return schedule(shuffled, arrivals(len(shuffled), rate, 1.0, seed))


async def send(url: str, model: str, calls: Sequence[Call]) -> Run:
    """Send all calls at their times, greedy and with their exact output lengths."""
    async with open_sender(Target(url, model, ignore_eos=True)) as sender:
        return await drive(calls, sender)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return latency percentiles in ms over successful requests, and attainment as a share of all sent requests."""
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
    """Return the figures of each class and of all requests."""
    parts = {one.name: [o for o in outcomes if o.call.slo.name == one.name] for one in CLASSES}
    return [{"class": name, **figures(part)} for name, part in {**parts, "all": outcomes}.items()]


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [root]
    for pid in found:  # `found` grows during the loop
        found += children.get(pid, [])
    return found


def peak_memory(root: int) -> int:
    """Return the summed peak RSS of a process tree in bytes. Shared pages count once per process."""
    total = 0
    for pid in process_tree(root):
        try:
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total


class OnlineSide:
    """The server of one engine, stopped (SIGSTOP) except during `run`."""

    def __init__(self, name: str, model: str, servers: Sequence[common.Server]) -> None:
        """Wrap the last of `servers`, which is up; the others are its earlier starts."""
        self.name = name
        self.start = [one.seconds for one in servers]
        self.memory = 0  # bytes
        self._model = model
        self._server = servers[-1]

    def signal(self, number: int) -> None:
        os.killpg(self._server.pid, number)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Send the calls and return their outcomes. Raises RuntimeError if an output has a wrong length."""
        self.signal(signal.SIGCONT)
        outcomes = asyncio.run(send(self._server.url, self._model, calls)).outcomes
        self.memory = peak_memory(self._server.pid)
        self.signal(signal.SIGSTOP)
        for line in errors(outcomes):
            print(f"{self.name}: {line}")
        if wrong := [one for one in outcomes if one.ok and one.output_tokens != one.call.output_tokens]:
            asked = wrong[0].call.output_tokens
            raise RuntimeError(f"{self.name} gave {wrong[0].output_tokens} tokens, but {asked} were requested")
        return list(outcomes)


def llama_server(program: str, model: Path, threads: int) -> list[str]:
    """Return the command of llama.cpp's server, with a float32 KV cache and no prompt cache."""
    flags = {"--model": model, "--threads": threads, "--parallel": SLOTS, "--ctx-size": SLOTS * SLOT_TOKENS}
    flags |= {"--cache-type-k": "f32", "--cache-type-v": "f32", "--cache-ram": 0}
    return [program, *(str(part) for pair in flags.items() for part in pair), "--no-cache-prompt", "--offline"]


def command_of(name: str, folder: Path, args: argparse.Namespace, stack: ExitStack) -> list[str]:
    """Return the command of a side's server. `stack` owns the files that the server reads.

    Raises RuntimeError if the side has no server, ValueError if the model cannot be written in its format.
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
    """Start a side `--starts` times, and keep the last server up until `stack` closes.

    Raises RuntimeError, ValueError or OSError, whose last line says why the side cannot serve.
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
    """Return all sides that start, and the reasons of the others by name. Raises RuntimeError if none starts."""
    sides: list[OnlineSide] = []
    left_out: dict[str, str] = {}
    for name in args.sides:
        try:
            sides.append(start(name, folder, args, stack))
        except (RuntimeError, ValueError, OSError) as error:
            # Paths of this machine are not part of the result.
            program = args.server.get(name) or args.python.get(name) or sys.executable
            left_out[name] = str(error).strip().splitlines()[-1].replace(program, Path(program).name)
            print(f"{name} is left out: {left_out[name]}")
    if not sides:
        raise RuntimeError(f"no side starts: {left_out}")
    return sides, left_out


def measured(sides: Sequence[OnlineSide], rate: float, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all sides in turns at one rate, `--repeats` times, and return rows over the pooled outcomes of each side."""
    pooled: dict[str, list[Outcome]] = {side.name: [] for side in sides}
    for repeat in range(args.repeats):
        # A different seed for each rate and repeat, so that no prefix cache holds the prompts.
        calls = mixed(round(rate * args.duration), rate, 1000 * number + repeat, args.slo_scale, args.vocabulary)
        first = repeat % len(sides)  # rotate, so that no side always goes first
        for side in (*sides[first:], *sides[:first]):
            pooled[side.name] += side.run(calls)
    return [{"rate": rate, "side": name, **row} for name, outcomes in pooled.items() for row in by_class(outcomes)]


def compared(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides on one model, and return its figures. Raises RuntimeError if no side starts."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    args = argparse.Namespace(**{**vars(args), "vocabulary": range(16, config["vocab_size"])})  # skip special tokens
    rates = [rate * RATE_FACTORS.get(name, 1.0) for rate in args.rates]
    with ExitStack() as stack:
        sides, left_out = started(folder, args, stack)
        for side in sides:
            side.run(mixed(args.warmups, float("inf"), WARMUP_SEED, args.slo_scale, args.vocabulary))
        rows = [row for number, rate in enumerate(rates) for row in measured(sides, rate, number, args)]
        ends = {side.name: {"start_s": side.start, "memory": side.memory} for side in sides}
    return {"model": name, "online": rows, "servers": ends, "left_out": left_out}


def show(found: Mapping[str, Any]) -> None:
    """Print one table per rate and one of the servers."""
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
