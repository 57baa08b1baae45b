"""Measure how a server starts: its port, its first answer, its last program, and the load that it carries meanwhile.

Each start is a new process. `cold` has empty caches, `kept` those that the cold start left. Times are from the command,
in seconds and in multiples of I, the time of `python -c "import jax, transformers"` in the same run. A client asks
`/health` until the port answers, and sends one completion as soon as it says 200. With `--load`, that many requests per
second follow for a minute; compare `-- --warmup full`. `--tree` measures another checkout, for example an older one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import common

from jaxserve.report.table import print_table

IMPORTS = "import jax, transformers"
SECONDS = 60  # of load
LIMIT = 900.0  # seconds for any of the events


def imports() -> float:
    """Return the seconds of the imports alone, the median of five."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        took.append(time.perf_counter() - began)
    return median(took)


def asked(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    """Return status and body of a request; status 0 if nothing listens."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def metrics(url: str) -> dict[str, float]:
    """Return the sums of metrics by name."""
    found: dict[str, float] = {}
    for line in asked(url + "/metrics")[1].decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("jaxserve:")
            found[name] = found.get(name, 0.0) + float(value)
    return found


def peak_memory(session: int) -> float:
    """Return the sum of the largest resident sizes of a session's processes, in GB."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if os.getsid(int(folder.name)) == session:
                lines = (folder / "status").read_text(encoding="utf-8").splitlines()
                total += next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
    return total * 1024 / 1e9


def measure(label: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start once, and return what was seen."""
    body = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
    port = answered = None
    tree = args.tree.resolve()
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAXSERVE_CACHE_DIR": str(cache)}
    began = time.perf_counter()
    with common.begun([sys.executable, "-m", "jaxserve.run", *args.flags], environment, tree) as (url, process, log):
        while answered is None:
            if process.poll() is not None or time.perf_counter() - began > LIMIT:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            status, _ = asked(url + "/health")
            now = time.perf_counter() - began
            port = now if port is None and status else port
            if status == 200:
                status, text = asked(url + "/v1/completions", body)
                if status != 200:
                    raise RuntimeError(f"the first completion got {status}: {text.decode()}")
                answered = time.perf_counter() - began
            else:
                time.sleep(0.02)
        load: dict[str, Any] = {}
        if args.load:
            load = common.bench(
                url,
                ["--request-rate", str(args.load), "--num-prompts", str(round(SECONDS * args.load)),
                 "--random-input-len", str(args.prompt), "--random-output-len", str(args.tokens),
                 "--random-range-ratio", "0.5", "--goodput", *args.goodput],
            )  # fmt: skip
        counts = metrics(url)
        while counts.get("programs_ready", 0) < counts.get("programs", 0):
            time.sleep(0.05)
            counts = metrics(url)
        whole = time.perf_counter() - began
        memory = peak_memory(process.pid)
        said = [line for line in log.read_text(errors="replace").splitlines() if "programs are ready" in line]
    assert port is not None
    if load and said:  # the load ends after the last program
        whole = answered + float(said[-1].rpartition(" s after")[0].rpartition(" ")[2])
    names = ("programs", "programs_loaded_total", "compilations_total", "programs_later_total", "program_traces_total")
    return {
        "caches": label,
        "port_s": port,
        "first_answer_s": answered,
        "all_programs_s": whole,
        "peak_memory_gb": memory,
        **{name: counts.get(name) for name in (*names, "compilations_after_warmup_total")},
        "load": load,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="cold starts, each followed by a kept one [%(default)s]")
    parser.add_argument("--tree", type=Path, default=common.ROOT, metavar="DIR", help="checkout to measure [this one]")
    parser.add_argument("--load", type=float, metavar="RPS", help="requests per second in the minute after the answer")
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS", help="of the load [%(default)s]")
    parser.add_argument("--tokens", type=int, default=32, metavar="TOKENS", help="of the load [%(default)s]")
    parser.add_argument("--goodput", nargs=2, default=["ttft:1400", "tpot:96"], metavar="METRIC:MS", help="%(default)s")
    common.add_output(parser, "startup")
    parser.add_argument("flags", nargs="*", default=["--mesh", "4x2"], help="server flags, after -- [--mesh 4x2]")
    args = parser.parse_args()
    rows, units = [], []
    for _ in range(args.runs):
        units.append(imports())
        with tempfile.TemporaryDirectory() as folder:
            for label in ("cold", "kept"):
                rows.append(measure(label, Path(folder), args) | {"import_s": units[-1]})
                print(json.dumps({name: value for name, value in rows[-1].items() if name != "load"}), flush=True)
    titles = ["caches", "I, s", "port, s", "I", "first answer, s", "I", "all programs, s", "I", "peak GB", "loaded",
              "compiled", "later", "traced", "attainment"]  # fmt: skip
    print_table(f"python -m jaxserve.run {' '.join(args.flags)}", titles, [_shown(row) for row in rows])
    common.save(args, {"rows": rows})
    return 0


def _shown(row: dict[str, Any]) -> list[Any]:
    unit = row["import_s"]
    times = [
        value for name in ("port_s", "first_answer_s", "all_programs_s") for value in (row[name], row[name] / unit)
    ]
    names = ("programs_loaded_total", "compilations_total", "programs_later_total", "program_traces_total")
    return [
        row["caches"], unit, *times, row["peak_memory_gb"], *(row[name] for name in names),
        row["load"].get("slo_attainment"),
    ]  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
