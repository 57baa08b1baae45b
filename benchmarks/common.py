"""Shared helpers of the benchmark scripts: result files, their origin, and servers to measure."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEMO = ROOT / "jaxserve" / "demo" / "model"
PACKAGES = ("jax", "jaxlib", "flax", "torch", "transformers", "numpy", "openai", "ray")

sys.path.insert(0, str(ROOT))  # so that `python benchmarks/x.py` measures this checkout, installed or not


def git(*words: str) -> str:
    """Return what git prints about this checkout; nothing without git, or outside a checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Return the CPU's name as the system reports it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def origin() -> dict[str, Any]:
    """Return the commit, machine and package versions, which every result file states."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") or "unknown",
        "uncommitted_changes": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "device": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **versions,
    }


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Add `--output`, and `--note` for circumstances that a reader must know, such as a busy machine."""
    default = _result(name)
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help="JSON [%(default)s]")
    parser.add_argument("--note", default="", help="stored in the JSON file")


def name_output(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str) -> None:
    """Give the result of a mode a name of its own, unless `--output` was given."""
    if args.output == parser.get_default("output"):
        args.output = _result(name)


def _result(name: str) -> Path:
    return RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.json"


def save(args: argparse.Namespace, payload: dict[str, Any], *, quiet: bool = False) -> None:
    """Write `payload` with its origin and settings to `args.output` as JSON; `quiet` prints no message."""
    settings = {
        name: value.name if isinstance(value, Path) else value  # folders of this machine are not part of the result
        for name, value in vars(args).items()
        if name not in ("output", "note")
    }
    whole = {"script": Path(sys.argv[0]).name, "settings": settings, "note": args.note, **origin(), **payload}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(whole, indent=1, default=str) + "\n", encoding="utf-8")
    if not quiet:
        print(f"wrote {args.output}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True)
class Server:
    url: str
    seconds: float  # from the command to the first 200 of /health
    log: Path
    pid: int  # leads a process group of its own


@contextmanager
def server(flags: Sequence[str], *, cache: Path | None = None, timeout: float = 900.0) -> Iterator[Server]:
    """Start `python -m jaxserve.run` on a free port, yield it once it is healthy, and end it afterwards.

    cache: folder of the persistent compilation cache. Raises RuntimeError with the end of the log if the server dies.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    with launched([sys.executable, "-m", "jaxserve.run", *flags], environment, timeout=timeout) as found:
        yield found


@contextmanager
def begun(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Start a server, which must accept --host and --port, on a free port; yield its URL, process and log at once.

    Ends it afterwards, and every process that it started.
    """
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.NamedTemporaryFile("wb", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", process, Path(log.name)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children that outlive the server


@contextmanager
def launched(command: Sequence[str], environment: Mapping[str, str], *, timeout: float = 900.0) -> Iterator[Server]:
    """Start a server, yield it once it is healthy, and end it afterwards.

    The server must answer /health. Raises RuntimeError with the end of its log if it dies or takes more than
    `timeout` seconds.
    """
    began = time.perf_counter()
    with begun(command, environment) as (url, process, log):
        while not healthy(url):
            if process.poll() is not None or time.perf_counter() - began > timeout:
                tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise RuntimeError(f"{' '.join(command)} is not healthy (status {process.poll()}):\n{tail}")
            time.sleep(0.02)
        yield Server(url, time.perf_counter() - began, log, process.pid)


def bench(url: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run `jaxserve bench` in a subprocess against a server, and return its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxserve", "bench", "--base-url", url, *flags]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "found.json"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        found = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found
