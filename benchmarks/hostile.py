"""Requests that once ended or stopped the server, beside 16 honest streams.

Starts the demo model with its fronts and engine in processes of their own, keeps 16 streams open, and sends each
attack three times. Prints its status, the gaps of the streams meanwhile (99th percentile, its ratio to that without an
attack, and the largest), and the memory of the server, also a minute after the last attack. Exits with 1 if a stream
ended early, an attack got another status than 400, 413, 431 or 503 (a bound may also let it pass: 200), or an
innocent request failed.

    python benchmarks/hostile.py
    python benchmarks/hostile.py --server-flags '--api-server-count 2 --mesh 1x1 --replicas 2 --ray local'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import common
import httpx
import numpy as np

from jaxserve.report.table import print_table

STREAMS = 16
SETTLE = 10.0  # seconds of streams before the first attack
REST = 60.0  # seconds after the last attack until memory is looked at again
ALLOWED = (200, 400, 404, 413, 431, 503)
PROMPT = {"prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HELD = {  # connections that stay open for as long as the attack: how many, what each has sent, and how often
    "5,000 idle connections": (5_000, b"", 0),
    "1,000 half-sent headers": (1_000, HEAD, 1),
    "1,000 half-sent bodies": (1_000, HEAD + b"Content-Length: 999\r\n\r\nx", 1),
    "5,000 requests in a row, unread": (1, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 5_000),
}


def chain(link: Any, count: int = 4_000) -> dict[str, Any]:
    """Return a schema of `count` definitions, each of which needs the next one."""
    defs = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(count)}
    return {"$defs": {**defs, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def lines(form: str, first: str, count: int = 4_000) -> str:
    """Return a grammar of `count` rules, each of which needs the next one."""
    return "\n".join([first, *(form.format(at, at + 1) for at in range(count))])


def divisible(by: int) -> dict[str, Any]:
    return {"guided_json": {"type": "integer", "multipleOf": by}}


def constraints() -> dict[str, list[dict[str, Any]]]:
    """Return the bodies of attacks by constraints of a completion, which are sent at the same time."""
    patterns = [{"type": "string", "pattern": f"a.{{{at}}}b"} for at in range(1, 200)]
    words = " | ".join(f"/[a-z {letter}]{{1,{at}}}/" for at, letter in enumerate("ABCDEFGHIJKLMNOP", 1))
    ambiguous = f"start: e\ne: e e | {words}"
    formats = {f"p{at}": {"type": "string", "format": "date-time"} for at in range(25_000)}
    array = chain(lambda to: {"type": "array", "items": to}, 2_000)
    return {
        "array definitions": [{"guided_json": array}],
        "array definitions, response_format": [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": array}}}
        ],
        "$ref": [{"guided_json": chain(lambda to: to)}],
        "anyOf": [{"guided_json": chain(lambda to: {"anyOf": [to, {"type": "string"}]})}],
        "allOf": [{"guided_json": chain(lambda to: {"allOf": [to, {"minimum": 1}]})}],
        "Lark rules": [{"guided_grammar": lines("r{0}: r{1}", 'start: r0\nr4000: "a"')}],
        "tokens": [{"guided_grammar": lines('R{0}: R{1} | "b"', 'start: R0\nR8000: "a"', 8_000)}],
        "GBNF rules": [{"guided_grammar": lines("r{0} ::= r{1}", 'root ::= r0\nr4000 ::= "a"')}],
        "n=200 with 1 MB": [{"n": 200, "guided_choice": ["a" * 1_048_566]}],
        "n=200 with 250 KB": [{"n": 200, "guided_choice": ["a" * 250_000]}],
        "choice beyond the context": [{"guided_choice": ["b" * 524_288 + "c" * 524_278]}],
        "multipleOf": [divisible(99_999_989), divisible(99_999_988)],
        "8 times multipleOf": [divisible(99_999_000 + at) for at in (1, 19, 29, 37, 49, 61, 73, 89)],
        "patterns": [{"guided_json": {"allOf": patterns}}],
        "80,000 alternatives": [{"guided_grammar": "root ::= " + " | ".join(f'"w{at}"' for at in range(80_000))}],
        "25,000 formats": [{"guided_json": {"type": "object", "properties": formats}}],
        "16 with slow masks": [{"guided_grammar": ambiguous, "max_tokens": 60}] * 16,
        "whitespace of 420 KB": [{"structured_outputs": {"json": {}, "whitespace_pattern": " ?" * 210_000}}],
    }


def elsewhere() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the paths and bodies of other attacks."""
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(330):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    said = [{"role": "user", "content": "x"}]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    many = [{"type": "function", "function": {"name": f"f{at}", "description": "d" * 6_000}} for at in range(120)]
    deep: Any = "x"
    for _ in range(900):
        deep = {"a": deep}
    return {
        "tools nested 330 deep": [
            ("/v1/chat/completions", {"messages": said, "tools": [tool], "tool_choice": "required", "max_tokens": 2})
        ],
        "70,000 reasoning items": [("/v1/responses", {"input": [*[thought] * 70_000, *said], "max_output_tokens": 16})],
        "detokenize 2.7 M ids": [("/detokenize", {"tokens": [5] * 2_700_000})],
        "tokenize 7 MB": [("/tokenize", {"prompt": "word " * 1_400_000})],
        "tools of 720 KB": [("/v1/chat/completions", {"messages": said, "tools": many, "max_tokens": 2})],
        "request id with CR": [("/v1/completions", {**PROMPT, "request_id": "a\r\nb\x1b[31m"})],
        "history nested 900 deep": [("/v1/chat/completions", {"messages": said, "metadata": deep, "max_tokens": 2})],
        "n=200 without a constraint": [("/v1/completions", {**PROMPT, "n": 200})],
        "4,000 messages": [("/v1/chat/completions", {"messages": said * 4_000, "max_tokens": 2})],
        "unknown model and field": [("/v1/completions", {**PROMPT, "model": "m" * 100_000, "x" * 100_000: 1})],
    }


def attacks() -> dict[str, list[tuple[str, bytes]]]:
    """Return the paths and bodies of each attack, encoded before anything is measured: that takes the client's time."""
    completions = {
        name: [("/v1/completions", {**PROMPT, **body}) for body in bodies] for name, bodies in constraints().items()
    }
    return {
        name: [(path, json.dumps(body).encode()) for path, body in bodies]
        for name, bodies in (completions | elsewhere()).items()
    }


def memory(pid: int) -> float:
    """Return the resident memory of a process and its descendants, in MiB."""
    total, waiting = 0, [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError):
            total += int((folder / "statm").read_text().split()[1])
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return total * 4096 / 2**20


class Stream:
    """An honest stream, opened again whenever it has had all of its tokens."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.last = time.perf_counter()
        self.gaps: list[float] = []  # seconds
        self.ended = ""  # why it ended early

    def heard(self) -> None:
        now = time.perf_counter()
        self.gaps.append(now - self.last)
        self.last = now

    async def run(self) -> None:
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        try:
            while True:
                text = ""
                async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        text = line or text
                        self.heard()
                if text != "data: [DONE]" or answer.status_code != 200:
                    self.ended = f"{answer.status_code} {text[:80]}"
                    return
        except httpx.HTTPError as error:
            self.ended = repr(error)


async def sent(client: httpx.AsyncClient, path: str, body: bytes) -> int:
    """Return the status of a request; 0 if there is none."""
    with suppress(httpx.HTTPError):
        return (await client.post(path, content=body)).status_code
    return 0


async def constrained(client: httpx.AsyncClient, expression: str) -> int:
    return await sent(client, "/v1/completions", json.dumps({**PROMPT, "guided_regex": expression}).encode())


class Seen:
    """What was seen beside one attack, over all rounds."""

    def __init__(self) -> None:
        self.statuses = set[int]()
        self.seconds = 0.0
        self.innocent = set[int]()
        self.waited = 0.0
        self.gaps: list[float] = []
        self.memory = 0.0

    def row(self, name: str, calm: float) -> dict[str, Any]:
        """calm: the 99th percentile of the gaps without an attack."""
        usual = float(np.quantile(self.gaps, 0.99))
        return {
            "attack": name,
            "status": " ".join(map(str, sorted(self.statuses))),
            "seconds": f"{self.seconds:.2f}",
            "innocent": " ".join(map(str, sorted(self.innocent))),
            "innocent_seconds": f"{self.waited:.2f}",
            "p99_gap": f"{usual:.3f}",
            "p99_ratio": f"{usual / calm:.2f}",
            "largest_gap": f"{max(self.gaps):.2f}",
            "memory_mib": f"{self.memory:.0f}",
        }


async def attacked(
    client: httpx.AsyncClient, streams: list[Stream], name: str, bodies: list[tuple[str, bytes]], seen: Seen
) -> None:
    """Send one attack and an innocent request beside it, and add what is seen."""
    holder = Holder(str(client.base_url), *HELD[name]) if name in HELD else None
    for stream in streams:
        stream.heard()
        stream.gaps.clear()
    began = time.perf_counter()
    if holder is not None:
        await asyncio.to_thread(holder.open)
    attacking = asyncio.gather(*(sent(client, *body) for body in bodies))
    await asyncio.sleep(0.2)
    asked = time.perf_counter()
    seen.innocent.add(await constrained(client, f"[a-z]{{{asked % 1e3:.0f}}}[{name[:1]}]"))
    seen.waited = max(seen.waited, time.perf_counter() - asked)
    seen.statuses.update(await attacking)
    if holder is not None:
        await asyncio.to_thread(holder.close)
    await asyncio.sleep(0.5)  # what the attack leaves behind, the server tidies up now
    seen.seconds = max(seen.seconds, time.perf_counter() - began)
    for stream in streams:
        stream.heard()
        seen.gaps += stream.gaps


async def measure(url: str, pid: int, rounds: int, only: str) -> tuple[list[dict[str, Any]], bool]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for count in range(16):  # every front has processes that compile before memory is looked at
            async with httpx.AsyncClient(base_url=url, timeout=120) as fresh:
                await asyncio.gather(*(constrained(fresh, f"[0-9]{{{count + 1}}}") for _ in range(2)))
                await sent(fresh, "/v1/completions", json.dumps({**PROMPT, **divisible(9_999_901 + count)}).encode())
        streams = [Stream(client) for _ in range(STREAMS)]
        running = [asyncio.ensure_future(stream.run()) for stream in streams]
        await asyncio.sleep(SETTLE)
        every = {**attacks(), **{name: [] for name in HELD}}
        every = {"none": [], **{name: bodies for name, bodies in every.items() if re.search(only, name)}}
        seen = {name: Seen() for name in every}
        for at in range(rounds):
            for name, bodies in every.items():
                await attacked(client, streams, name, bodies, seen[name])
                seen[name].memory = memory(pid)
                calm = float(np.quantile(seen["none"].gaps, 0.99))
                print(f"round {at + 1}: {seen[name].row(name, calm)}", file=sys.stderr, flush=True)
        rows = [one.row(name, calm) for name, one in seen.items()]
        await asyncio.sleep(REST)
        rows.append({**dict.fromkeys(rows[0], ""), "attack": f"{REST:g} s later", "memory_mib": f"{memory(pid):.0f}"})
        for task in running:
            task.cancel()
        ended = [stream.ended for stream in streams if stream.ended]
        for why in ended:
            print(f"a stream ended: {why}", file=sys.stderr)
        allowed = all(one.statuses <= set(ALLOWED) and one.innocent == {200} for one in seen.values())
        return rows, allowed and not ended


HOLD = """
import resource, socket, sys
host, port, count, said = *sys.argv[1:3], int(sys.argv[3]), bytes.fromhex(sys.argv[4]) * int(sys.argv[5])
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 64, max(count + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
print(flush=True)
sys.stdin.readline()
held = []
for _ in range(count):
    held.append(socket.create_connection((host, int(port))))
    held[-1].setblocking(False)
    try:
        held[-1].send(said)
    except OSError:
        pass
print(flush=True)
sys.stdin.readline()
"""


class Holder:
    """Holds connections open in a process that measures nothing. Writer: `attacked`."""

    def __init__(self, url: str, count: int, said: bytes, times: int) -> None:
        """said: what each connection sends, so many times."""
        host, port = url.rstrip("/").rpartition("/")[2].split(":")
        arguments = [sys.executable, "-S", "-c", HOLD, host, port, str(count), said.hex(), str(times)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._heard()

    def _heard(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def open(self) -> None:
        print(file=self._process.stdin, flush=True)
        self._heard()

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each attack is sent [%(default)s]")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only attacks with this in their name")
    common.add_output(parser, "hostile")
    parser.add_argument(
        "--server-flags", default="--api-server-count 2", metavar="FLAGS", help="flags of the server [%(default)s]"
    )
    args = parser.parse_args()
    with common.server([*args.server_flags.split(), "--warmup", "full"]) as server:
        rows, good = asyncio.run(measure(server.url, server.pid, args.rounds, args.only))
    print_table("", list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    common.save(args, {"rows": rows})
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
