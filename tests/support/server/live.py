"""A server in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from jaxserve.server.service import Service
from jaxserve.server.serving import Ending, listen_on, serve
from tests.support.server import vendors
from tests.support.timing import PATIENCE, until

if TYPE_CHECKING:
    import anthropic
    import openai

MODEL = "jaxserve-demo"
SMALL = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "32MiB",
    "profile_time": 0.5,  # seconds; by default step times are measured for 10 at the first start
    "disable_log_stats": True,
    "seed": 0,
}
# For one instance: with the memory that SMALL gives to each of two, it has the same programs, which compile once.
ALONE = {**SMALL, "kv_cache_memory": "16MiB"}
ADMIN = "boss"  # the admin key of `live`


def at_rest(engine: Any) -> None:
    """Wait until an engine has no request."""
    until(lambda: not ((stats := engine.stats()).running or stats.waiting), engine.stats)


def connect(url: str, *parts: bytes) -> socket.socket:
    """Open a connection to a server, and send bytes over it."""
    host, port = url.rpartition("/")[2].split(":")
    made = socket.create_connection((host, int(port)), timeout=PATIENCE)
    for part in parts:
        made.sendall(part)
    return made


class Live:
    """A server in a thread of this process."""

    def __init__(self, service: Service | Callable[[], Awaitable[Service]], engine: Any = None) -> None:
        """Serve a service, or one to make on the server's loop, as a service of a remote `engine` must be."""
        self._made = service
        if isinstance(service, Service):
            self.service = service
        self.engine: Any = service.engine if isinstance(service, Service) else engine
        self._sock = listen_on("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the server did not start"
        # verify: loading the certificates, which plain HTTP does not need, takes longer than an answer.
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False)

    @cached_property
    def client(self) -> openai.OpenAI:
        """OpenAI's client of this server."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=120, max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
        )  # fmt: skip

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        """Anthropic's client of this server."""
        return vendors.anthropic_of(self.url, timeout=PATIENCE)

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        if not isinstance(self._made, Service):
            self.service = await self._made()
        await serve(self.service, self._sock, self._started)

    def _started(self, ending: Ending) -> None:
        self.ending, self._loop = ending, asyncio.get_running_loop()
        self._ready.set()

    def sent(self) -> str:
        """Return the prompt that an engine double has received last, as text."""
        return str(self.service.tokenizer.decode(self.engine.submitted[-1].prompt, skip_special_tokens=False))

    def samples(self) -> list[Sample]:
        """Return what `/metrics` shows."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return [sample for family in families for sample in family.samples]

    def sums(self) -> dict[str, float]:
        """Return the sum over all labels of each metric, but for the buckets, without its prefix."""
        made = Counter[str]()
        for one in self.samples():
            if "le" not in one.labels:
                made[one.name.removeprefix("jaxserve:")] += one.value
        return made

    def call(self, work: Callable[[], None]) -> None:
        """Run `work` on the server's event loop."""
        self._loop.call_soon_threadsafe(work)

    def quiet(self) -> None:
        """Wait until no request runs; fails if one remains."""
        until(lambda: not self.service.active)
        at_rest(self.engine)

    def stop(self) -> None:
        self.http.close()
        for name in {"client", "anthropic"} & set(vars(self)):
            getattr(self, name).close()
        if self._thread.is_alive():
            self.call(self.ending.now)
            self._thread.join(PATIENCE)
        self._sock.close()
        self.service.close()
