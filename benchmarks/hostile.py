"""Requests that once ended or stopped the server, beside 16 honest streams.

Starts the demo model with its fronts and engine in processes of their own, keeps 16 streams open, and sends each
attack. Prints its status, the largest gap of any stream meanwhile, and the memory of the server before, at most, and a
minute after the last attack. Exits with 1 if a stream ended early, an attack got another status than 400, 413, 431 or
503 (a bound may also let it pass: 200), or an innocent request failed.

    python benchmarks/hostile.py
    python benchmarks/hostile.py --server-flags '--api-server-count 2 --mesh 1x1 --replicas 2 --ray local'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import common
import httpx

from jaxserve.report.table import print_table

STREAMS = 16
REST = 60.0  # seconds after the last attack until memory is looked at again
ALLOWED = (200, 400, 404, 413, 431, 503)
PROMPT = {"prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
HELD = {  # connections that stay open for as long as the attack: how many, and what each has sent
    "5,000 idle connections": (5_000, b""),
    "1,000 half-sent headers": (1_000, HEAD),
    "1,000 half-sent bodies": (1_000, HEAD + b"Content-Length: 999\r\n\r\nx"),
    "5,000 requests in a row, unread": (1, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 5_000),
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
        "detokenize 3.9 M ids": [("/detokenize", {"tokens": [5] * 3_900_000})],
        "tokenize 7 MB": [("/tokenize", {"prompt": "word " * 1_400_000})],
        "tools of 720 KB": [("/v1/chat/completions", {"messages": said, "tools": many, "max_tokens": 2})],
        "request id with CR": [("/v1/completions", {**PROMPT, "request_id": "a\r\nb\x1b[31m"})],
        "history nested 900 deep": [("/v1/chat/completions", {"messages": said, "metadata": deep, "max_tokens": 2})],
        "4,000 messages": [("/v1/chat/completions", {"messages": said * 4_000, "max_tokens": 2})],
        "unknown model and field": [("/v1/completions", {**PROMPT, "model": "m" * 100_000, "x" * 100_000: 1})],
    }


def attacks() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the paths and bodies of each attack."""
    completions = {
        name: [("/v1/completions", {**PROMPT, **body}) for body in bodies] for name, bodies in constraints().items()
    }
    return completions | elsewhere()


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
        self.gap = 0.0
        self.ended = ""  # why it ended early

    def heard(self) -> None:
        now = time.perf_counter()
        self.gap, self.last = max(self.gap, now - self.last), now

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


async def sent(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> int:
    """Return the status of a request; 0 if there is none."""
    with suppress(httpx.HTTPError):
        return (await client.post(path, json=body)).status_code
    return 0


async def constrained(client: httpx.AsyncClient, expression: str) -> int:
    return await sent(client, "/v1/completions", {**PROMPT, "guided_regex": expression})


async def measure(url: str, pid: int) -> tuple[list[dict[str, Any]], bool]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await constrained(client, "[0-9]")
        streams = [Stream(client) for _ in range(STREAMS)]
        running = [asyncio.ensure_future(one.run()) for one in streams]
        await asyncio.sleep(3)
        rows, good = list[dict[str, Any]](), True
        every: dict[str, list[tuple[str, dict[str, Any]]]] = {"none": [], **attacks()}
        for name, bodies in (*every.items(), *((name, []) for name in HELD)):
            for one in streams:
                one.heard()
                one.gap = 0.0
            began = time.perf_counter()
            with await asyncio.to_thread(held, url, *HELD.get(name, (0, b""))):
                attacking = asyncio.gather(*(sent(client, *body) for body in bodies))
                await asyncio.sleep(0.2)
                asked = time.perf_counter()
                innocent = await constrained(client, f"[a-z]{{{len(rows) + 3}}}")
                waited = time.perf_counter() - asked
                statuses = await attacking
            seconds = time.perf_counter() - began
            for one in streams:
                one.heard()
            row = {
                "attack": name,
                "status": " ".join(map(str, sorted(set(statuses)))),
                "seconds": round(seconds, 2),
                "innocent": innocent,
                "innocent_seconds": round(waited, 2),
                "largest_gap": round(max(one.gap for one in streams), 2),
                "ended": sum(bool(one.ended) for one in streams),
                "memory_mib": round(memory(pid)),
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            good = good and not row["ended"] and innocent == 200 and set(statuses) <= set(ALLOWED)
        await asyncio.sleep(REST)
        rows.append({**dict.fromkeys(rows[0], ""), "attack": f"{REST:g} s later", "memory_mib": round(memory(pid))})
        for task in running:
            task.cancel()
        for one in streams:
            if one.ended:
                print(f"a stream ended: {one.ended}", file=sys.stderr)
        return rows, good


def held(url: str, count: int, said: bytes) -> ExitStack:
    """Return open connections that have sent some bytes, as a context."""
    host, port = url.rpartition("/")[2].split(":")
    connections = ExitStack()
    for _ in range(count):
        connection = connections.enter_context(socket.create_connection((host, int(port))))
        connection.setblocking(False)
        with suppress(BlockingIOError, ConnectionError):
            connection.send(said)
    return connections


def allow_files(count: int) -> None:
    """Let this process open so many files, as far as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_output(parser, "hostile")
    parser.add_argument(
        "--server-flags", default="--api-server-count 2", metavar="FLAGS", help="flags of the server [%(default)s]"
    )
    args = parser.parse_args()
    allow_files(max(count for count, _ in HELD.values()) + 1_000)
    with common.server(args.server_flags.split()) as server:
        rows, good = asyncio.run(measure(server.url, server.pid))
    print_table("", list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    common.save(args, {"rows": rows})
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
