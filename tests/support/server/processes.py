"""A server of `jaxserve.run` with its processes, as its users start it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.support.timing import PATIENCE

SMALL = (  # the sizes of ALONE of tests/support/server/live.py, so that its programs are in the cache
    "--port 0 --max-model-len 256 --max-num-seqs 8 --max-num-batched-tokens 64 --kv-cache-memory 16MiB "
    "--profile-time 500ms --disable-log-stats"
)
JOIN = PATIENCE


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def children(pid: int) -> list[int]:
    """Return the child processes that are not zombies, without multiprocessing's resource tracker."""
    made = []
    for task in Path(f"/proc/{pid}/task").iterdir():  # an engine that starts again is a child of another thread
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                    made.append(int(child))
    return made


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


class Running:
    """A server that is ready."""

    def __init__(self, process: subprocess.Popen[str], url: str, replicas: int, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        made = children(process.pid)  # the main thread starts an engine and the fronts, others more engines
        more = len(made) - (replicas - 1)
        self.fronts, self.engines = made[1:more], made[:1] + made[more:]

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels, asked over a connection of its own."""
        text = httpx.get(f"{self.url}/metrics", timeout=JOIN, verify=False).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}{{"))

    def owners(self) -> dict[int, int]:
        """Return the process that has each open connection of this test, by the test's port."""
        port = int(self.url.rpartition(":")[2])
        found: dict[str, int] = {}
        for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = row.split()[:10]
            if int(local.split(":")[1], 16) == port and state == "01":
                found[inode] = int(remote.split(":")[1], 16)
        made = {}
        for pid in children(self.process.pid):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
                    if match and match[1] in found:
                        made[found[match[1]]] = pid
        return made


@contextmanager
def served(flags: str, log: Path, *, replicas: int = 1) -> Iterator[Running]:
    """Start a small server with more flags, and kill it at the end."""
    command = [sys.executable, "-m", "jaxserve.run", *SMALL.split(), *flags.split(), "--replicas", str(replicas)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        found = (re.search(r"ready at (https?://[\d.:]+)\.", line) for line in process.stdout)
        ready = next((match for match in found if match), None)
        assert ready is not None, log.read_text()[-2000:]
        yield Running(process, ready[1], replicas, log)
    finally:
        process.kill()
        process.communicate()
