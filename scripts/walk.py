"""List the files of the repository that one request runs through, in order.

    scripts/walk             # one POST /v1/completions, and one prompt of LLM.generate
    scripts/walk http        # only the first
    scripts/walk --stays     # every stay instead of every file

Serves the demo model in this process, sends one warm-up request, and records a second one: a prompt of a few tokens and
two output tokens, not streamed. Each call of a function of the repository, and each resumption of a coroutine, enters
its file; consecutive entries of the same file are one stay. A stay is a return if its thread was in that file before.
Files are listed by first entry with their number of stays, separately for each thread, since threads interleave at
random. The engine's thread wakes at different times in each run, so its stays vary by a fifth, and a file of its
housekeeping may be missing. All stays within `Service.prepare`, up to its return, are also listed separately; they are
the same in every run. Generated code, libraries and imports are not recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WITHIN = "Service.prepare"
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "32MiB",
}
PROMPT, TOKENS = "def main(", 2
SETTLES = 0.5  # seconds after an answer until the engine's threads are idle

Walk = list[str]  # one file per stay


class Recorder:
    """A profile function for all threads, which records inside `recording`.

    Writers: every profiled thread, each to its own walk.
    """

    def __init__(self, root: Path = ROOT, within: str = WITHIN) -> None:
        self.walks: dict[str, Walk] = {}  # thread -> files
        self.inside: Walk = []  # stays during `within`
        self._root, self._within = root, within
        self._on = False
        self._names: dict[CodeType, str] = {}  # code -> its file, or "" if outside the repository
        self._open: dict[int, int] = {}  # thread -> frames of `within` on its stack

    def install(self) -> None:
        """Install for this and future threads; Python 3.11 cannot profile threads that already run."""
        threading.setprofile(self)
        sys.setprofile(self)

    @staticmethod
    def uninstall() -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.walks, self.inside, self._on = {}, [], True
        try:
            yield
        finally:
            self._on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on or event not in ("call", "return"):
            return
        code, thread = frame.f_code, threading.get_ident()
        if code.co_qualname == self._within:
            self._open[thread] = self._open.get(thread, 0) + (1 if event == "call" else -1)
        if event == "return":
            return
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = self._name(code)
        if not name:
            return
        enter(self.walks.setdefault(thread_name(), []), name)
        if self._open.get(thread):
            enter(self.inside, name)

    def _name(self, code: CodeType) -> str:
        if code.co_name == "<module>" or code.co_filename.startswith("<") or code.co_filename == __file__:
            return ""
        path = Path(os.path.realpath(code.co_filename))
        return str(path.relative_to(self._root)) if path.is_relative_to(self._root) else ""


def thread_name() -> str:
    """Return the name of the current thread without its number in a pool, which is random."""
    return re.sub(r"[-_]\d+$", "", threading.current_thread().name)


def enter(walk: Walk, name: str) -> None:
    """Append a stay, unless the walk is already in that file."""
    if not walk or walk[-1] != name:
        walk.append(name)


def counts(walk: Walk) -> str:
    """Return the counts of stays, files and returns in words."""
    return f"{len(walk)} stays in {len(set(walk))} files, {len(walk) - len(set(walk))} returns"


def every_stay(title: str, walk: Walk) -> Iterator[str]:
    """Yield a line per stay; `<` marks a return."""
    yield f"{title}: {counts(walk)}"
    been: set[str] = set()
    for name in walk:
        yield f"  {'<' if name in been else ' '} {name}"
        been.add(name)


def every_file(title: str, walk: Walk) -> Iterator[str]:
    """Yield a line per file, in the order of first entry, with its number of stays."""
    yield f"{title}: {counts(walk)}"
    yield from (f"  {stays:4d}  {name}" for name, stays in Counter(walk).items())


def report(title: str, walks: dict[str, Walk], stays: bool) -> Iterator[str]:
    """Yield the report on the walks of all threads."""
    files = len({name for walk in walks.values() for name in walk})
    total = sum(map(len, walks.values()))
    yield f"{title}: {total} stays in {files} files and {len(walks)} threads"
    for thread, walk in walks.items():
        yield from (every_stay if stays else every_file)(f"thread {thread}", walk)


def http_walk(recorder: Recorder) -> None:
    """Record one POST /v1/completions to a server in this process."""
    from jaxserve.config import ServeConfig
    from jaxserve.server.main import start_service
    from jaxserve.server.serving import listen_on, serve

    service = start_service(ServeConfig.load(disable_log_stats=True, **SETTINGS))
    sock, ready, loops, endings = listen_on("127.0.0.1", 0), threading.Event(), [], []

    def started(ending: Any) -> None:
        loops.append(asyncio.get_running_loop())
        endings.append(ending)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve(service, sock, started)), name="server")
    thread.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the server did not start within 60 s")
        port = sock.getsockname()[1]
        post(port)
        time.sleep(SETTLES)
        with recorder.recording():
            post(port)
            time.sleep(SETTLES)
    finally:
        if loops:
            loops[0].call_soon_threadsafe(endings[0].now)
        thread.join(30)
        sock.close()
        service.close()
        service.engine.close()


def post(port: int) -> None:
    """Send the request. Raises RuntimeError if the status is not 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise RuntimeError(f"POST /v1/completions: {response.status} {text[:200]!r}")
    finally:
        connection.close()


def prompt_walk(recorder: Recorder) -> None:
    """Record one prompt of LLM.generate."""
    from jaxserve import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    with LLM(**SETTINGS) as llm:
        llm.generate(PROMPT, params)
        time.sleep(SETTLES)
        with recorder.recording():
            llm.generate(PROMPT, params)
            time.sleep(SETTLES)


WALKS: dict[str, tuple[str, Callable[[Recorder], None]]] = {
    "http": ("POST /v1/completions", http_walk),
    "prompt": ("LLM.generate", prompt_walk),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run scripts/walk."""
    parser = argparse.ArgumentParser(
        prog="scripts/walk", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{' or '.join(WALKS)} [both]")
    parser.add_argument("--stays", action="store_true", help="list every stay instead of every file")
    args = parser.parse_args(argv)
    unknown = [one for one in args.walks if one not in WALKS]
    if unknown:
        parser.error(f"walk {unknown[0]!r} must be one of {', '.join(WALKS)}")
    for name in args.walks or WALKS:
        title, walk = WALKS[name]
        recorder = Recorder()
        recorder.install()
        try:
            walk(recorder)
        finally:
            recorder.uninstall()
        print("\n".join(report(title, recorder.walks, args.stays)))
        if recorder.inside:
            print("\n".join(every_stay(f"{WITHIN} alone", recorder.inside)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
