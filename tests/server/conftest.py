"""Servers to talk to: one with a real engine for the whole session, and as many with a double as tests want."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.main import Ending, listen_on, serve
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

MODEL = "jaxserve-demo"
SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "32MiB",
    "disable_log_stats": True,
}
ADMIN = "boss"  # the admin key of `live`


class Live:
    """A server in a thread of this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.engine: Any = service.engine
        self._sock = listen_on("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(30), "the server did not come up"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0)

    def _main(self) -> None:
        asyncio.run(serve(self.service, self._sock, self._started))

    def _started(self, ending: Ending) -> None:
        self.ending, self._loop = ending, asyncio.get_running_loop()
        self._ready.set()

    def call(self, work: Callable[[], None]) -> None:
        """Run something on the server's loop."""
        self._loop.call_soon_threadsafe(work)

    def quiet(self, timeout: float = 30.0) -> None:
        """Wait until nothing runs; fails where something stays."""
        end = time.monotonic() + timeout
        while (stats := self.engine.stats()).running or stats.waiting or self.service.active:
            assert time.monotonic() < end, stats
            time.sleep(0.02)

    def stop(self) -> None:
        self.http.close()
        self.client.close()
        if self._thread.is_alive():
            self.call(self.ending.now)
            self._thread.join(30)
        self._sock.close()
        self.service.close()


@pytest.fixture(autouse=True, scope="session")
def _few_mappings(compiled_is_let_go: Callable[[int], None]) -> None:
    """Before the first engine only: those here live on, and say how often they compile."""
    compiled_is_let_go(10_000)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(jaxserve.demo.model_path())


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A real engine: the demo model, one instance that prefills and one that decodes."""
    from jaxserve.engine.engine import Engine

    made = Engine.start(ServeConfig.load(mesh="2x1", max_num_queued_reqs=200, **SMALL))
    yield made
    made.close()


@pytest.fixture(scope="session")
def live(engine: Any, tokenizer: Tokenizer) -> Iterator[Live]:
    """A server with the real engine."""
    made = Live(Service(engine, tokenizer, ServeConfig.load(mesh="2x1", admin_key=(ADMIN,), **SMALL)))
    yield made
    made.stop()


@pytest.fixture
def fake(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """Makes servers whose engine is a double: `fake(delay=0.01)`, with settings as `config=dict(…)`."""
    from double import Double

    made: list[Live] = []

    def start(config: dict[str, Any] | None = None, **more: Any) -> Live:
        settings = {"disable_log_stats": True, **(config or {})}
        made.append(Live(Service(Double(**more), tokenizer, ServeConfig.load(**settings))))
        return made[-1]

    yield start
    for one in made:
        one.stop()
