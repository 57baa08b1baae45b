"""`jaxserve top`: watch a server by its metrics alone."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from jaxserve.cli.server_flags import add_server, api_key, base_url
from jaxserve.cli.top.sample import Interval, Sample
from jaxserve.cli.top.view import view
from jaxserve.errors import InvalidValue
from jaxserve.report.printable import printable_line
from jaxserve.yamlio import seconds

DESCRIPTION = "Watch a jaxserve server, or any other with vLLM's metrics, in a live table."
EPILOG = """examples:
  jaxserve top                                       # the server at http://127.0.0.1:8000
  jaxserve top --url http://gpu-box:8000 --interval 5s
  jaxserve top --once                                # one table of one interval, for scripts

Keys: q leaves, space pauses, s switches between the last interval and all since the server started, + and - change the
interval. Rates, latencies and attainment are those of the last interval; p50 and p95 are estimated from histograms.
"""
LARGEST = 16 << 20  # bytes of metrics
SHORTEST, LONGEST = 0.5, 60.0  # seconds of an interval, by keys
NAMED = 4  # models in the title
KEYS = "q leave   space pause   s since start   + - interval"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_server(parser)
    parser.add_argument("--interval", type=seconds, default=2.0, metavar="TIME", help="time between two looks [2s]")
    parser.add_argument("--once", action="store_true", help="print the table of one interval, and end")


def main(args: argparse.Namespace) -> int:
    """Watch until a key or a signal ends it. Raises InvalidValue for invalid settings."""
    if not args.interval > 0:
        raise InvalidValue(f"interval={args.interval!r} must be above 0 s", "interval")
    reader = Reader(base_url(args.url), api_key(args))
    console = Console(highlight=False)
    if args.once or not (console.is_terminal and sys.stdin.isatty()):
        if not console.is_terminal:
            console.width = 200  # never leave out a column of a log
        return asyncio.run(once(reader, args.interval, console))
    return asyncio.run(Screen(reader, args.interval, console).run())


class Away(Exception):
    """The server did not answer with metrics."""


class Reader:
    """Reads the metrics of one server."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def read(self) -> Sample:
        """Return a reading. Raises Away."""
        timeout = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http,
                http.get(f"{self.url}/metrics") as answer,
            ):
                if answer.status != 200:
                    hint = ": set --api-key" if answer.status in (401, 403) else ""
                    raise Away(f"/metrics answers HTTP {answer.status}{hint}")
                data = bytearray()
                async for part in answer.content.iter_any():
                    data += part
                    if len(data) > LARGEST:
                        raise Away(f"/metrics is longer than {LARGEST >> 20} MiB")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Away(str(error) or "no answer in time") from error
        try:
            return await asyncio.to_thread(Sample, data.decode(errors="replace"), time.monotonic())
        except InvalidValue as error:
            raise Away(str(error)) from error


async def once(reader: Reader, interval: float, console: Console) -> int:
    """Print the table of one interval; return 1 if the server is away."""
    try:
        before = await reader.read()
        await asyncio.sleep(interval)
        latest = Interval(await reader.read(), before)
    except Away as error:
        print(f"jaxserve top: error: {reader.url}: {printable_line(str(error))}", file=sys.stderr)
        return 1
    console.print(_title(reader.url, latest, since_start=False), view(latest, console))
    return 0


def _title(url: str, interval: Interval, since_start: bool) -> Text:
    models = interval.now.values("num_requests_running", "model_name")
    model = ", ".join(models[:NAMED]) + (f" and {len(models) - NAMED} more" if len(models) > NAMED else "")
    over = "since start" if since_start or interval.seconds != interval.seconds else f"last {interval.seconds:.1f} s"
    title = Text(printable_line(model or "a model"), "bold")
    title.append(f" at {printable_line(url)}, {over}", "none")
    if interval.now.has("ready") and not interval.now.total("ready"):
        title.append("  not ready", "yellow")
    return title


class Screen:
    """The live table. Writer of its state: the event loop."""

    def __init__(self, reader: Reader, interval: float, console: Console) -> None:
        self._reader = reader
        self._interval = interval
        self._console = console
        self._since_start = False
        self._paused = False
        self._left = False
        self._pressed = asyncio.Event()
        self._found: Interval | None = None  # of the last answer
        self._away = ""  # why there is none now

    def press(self, key: str) -> None:
        if key in ("q", "Q", "\x03", "\x04"):
            self._left = True
        elif key == " ":
            self._paused = not self._paused
        elif key == "s":
            self._since_start = not self._since_start
        elif key in "+-":
            factor = 2.0 if key == "+" else 0.5
            self._interval = min(LONGEST, max(SHORTEST, self._interval * factor))
        self._pressed.set()

    async def look(self) -> None:
        """Read once; an away server keeps the last tables."""
        try:
            now = await self._reader.read()
        except Away as error:
            self._away = str(error)
            return
        self._away = ""
        self._found = Interval(now, None if self._found is None else self._found.now)

    def draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._away:
            text = f"{self._reader.url} is away: {self._away}; next try in {self._interval:g} s"
            parts.append(Text(printable_line(text), "red"))
        if self._found is not None:
            shown = Interval(self._found.now) if self._since_start else self._found
            parts += [_title(self._reader.url, shown, self._since_start), view(shown, self._console)]
        elif not self._away:
            parts.append(Text(f"reading {printable_line(self._reader.url)}/metrics"))
        state = f"every {self._interval:g} s" + (", paused" if self._paused else "")
        parts.append(Text(f"{state}   {KEYS}", "dim", overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    async def run(self) -> int:
        """Show until a key ends it."""
        with _keys(self.press), Live(console=self._console, screen=True, auto_refresh=False) as live:
            while not self._left:
                if not self._paused:
                    await self.look_or_leave()
                live.update(self.draw(), refresh=True)
                await self._wait(live)
        return 0

    async def look_or_leave(self) -> None:
        """Read once; a key that leaves does not wait for a server that does not answer."""
        looking = asyncio.ensure_future(self.look())
        while not (looking.done() or self._left):
            self._pressed.clear()
            pressed = asyncio.ensure_future(self._pressed.wait())
            await asyncio.wait((looking, pressed), return_when=asyncio.FIRST_COMPLETED)
            pressed.cancel()
        if self._left:
            looking.cancel()
        await asyncio.wait((looking,))

    async def _wait(self, live: Live) -> None:
        """Wait for an interval; a key is shown at once."""
        end = time.monotonic() + self._interval
        while not self._left and (left := end - time.monotonic()) > 0:
            self._pressed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pressed.wait(), left)
            live.update(self.draw(), refresh=True)


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` with every key that is typed, without Enter and without an echo."""
    import termios
    import tty

    file, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(file)

    def read() -> None:
        for key in os.read(file, 64).decode(errors="replace") or "q":
            press(key)

    tty.setcbreak(file)
    loop.add_reader(file, read)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
