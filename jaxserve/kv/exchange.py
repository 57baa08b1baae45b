"""What an engine process exchanges with others: KV pages, in a thread with a loop of its own.

The engine's loop only dispatches copies, so that the bytes of pages keep no step waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from jaxserve.engine.engine import Engine
from jaxserve.engine.memory.transfer import KVBuffer, padded, piece_sizes
from jaxserve.engine.programs.checksum import checksums
from jaxserve.engine.runtime.info import EngineInfo, Stats
from jaxserve.engine.runtime.kv_pages import Export
from jaxserve.errors import InvalidValue
from jaxserve.kv.client import Destination
from jaxserve.kv.direct import Direct, direct_host
from jaxserve.kv.layout import layout_of, shards_of
from jaxserve.kv.remote import RemoteKV
from jaxserve.kv.server import KVServer
from jaxserve.kv.share import KVShare
from jaxserve.sched.api.policy import Role
from jaxserve.sched.api.request import Request
from jaxserve.wire.address import Address

log = logging.getLogger(__name__)

T = TypeVar("T")
Told = TypeVar("Told", EngineInfo, Stats)

PATIENCE = 60.0  # seconds for which a prefetch lasts: prompts that are late may wait long until they are computed


class KVExchange:
    """Gives pages of an engine, takes those of others, and has the role of its replica.

    The instances of the engine do what they are asked to, whatever the role: it is for fronts to see.
    """

    def __init__(self, engine: Engine, share: KVShare) -> None:
        self.role = share.role
        self.address: Address  # set by `start`
        self._engine = engine
        self._share = share
        self._remote: RemoteKV
        self._server: KVServer
        self._ahead: _Ahead
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxserve-kv", daemon=True)

    def start(self, engine: Address) -> None:
        """Listen beside the address of the engine, and let it fetch pages. Raises InvalidValue."""
        machine, share = self._engine.machine, self._share
        executor = machine.executors[0]
        direct = self._direct(engine)
        page = executor.state.kv_buffer(1)
        destination = Destination(
            layout_of(machine), shards_of(machine), page, piece_sizes(executor.state.programs.limits.row_pages)
        )
        self._remote = RemoteKV(self._loop, share.key, destination, direct, share.transport)
        self._ahead = _Ahead(self._remote)
        self._thread.start()

        async def begun() -> None:
            if direct is not None:
                self._warm()
            self._engine.add_kv_source(self._remote)

        async def listening() -> Address:
            size = sum(array.nbytes for array in page)
            self._server = KVServer(
                _EnginePages(self._engine), destination.layout, destination.shards, size, share.key, direct
            )
            beside = Address(path=f"{engine.path}-kv") if engine.path else engine._replace(port=0)
            beside.vacate()
            return await self._server.start(beside)

        self._engine.run(begun)
        self.address = self._call(listening())

    def close(self) -> None:
        async def closed() -> None:
            self._server.close()
            await self._remote.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        if self._thread.is_alive():
            self._call(closed())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _direct(self, engine: Address) -> Direct | None:
        """Start the transfer server of jax; None if it is not wanted or cannot run."""
        if self._share.transport == "host":
            return None
        host = direct_host(engine)
        try:
            if host is None:
                raise RuntimeError(f"{engine} is no address that other processes can connect to")
            return Direct(host)
        except (RuntimeError, ImportError, AttributeError) as error:
            if self._share.transport == "direct":
                raise InvalidValue(f"kv_transfer='direct' is not possible: {error}", "kv_transfer") from error
            log.info("KV goes through the host: %s", error)
            return None

    def _warm(self) -> None:
        """Compile and run the checksums of all pieces. On the engine's loop, before its first request."""
        machine = self._engine.machine
        for executor in machine.executors:
            state, limits = executor.state, executor.state.programs.limits
            for size in piece_sizes(limits.row_pages):
                exported = state.export(padded((), size, limits.pages))
                jax.block_until_ready([checksums(exported), checksums(state.receive(exported))])
        machine.compiled.warm()

    # requests, on the engine's loop

    def prefetch(self, prompt: Sequence[int], salt: bytes, kv_from: str) -> None:
        """Fetch the pages of a prompt while the engine at `kv_from` computes them."""
        self._engine.prefetch(prompt, salt, kv_from, self._ahead, PATIENCE)

    # roles

    def set_roles(self, roles: Mapping[int, Role]) -> None:
        """Set the role of the replica, or those of its instances. Raises InvalidValue if it was to have several."""
        if self.role is None:
            self._engine.set_roles(roles)
            return
        count = len(self._engine.info.instances)
        wanted = [roles.get(index, self.role) for index in range(count)]
        if len(set(wanted)) > 1:
            given = [role.value for role in wanted]
            raise InvalidValue(
                f"roles={given} must be equal: all instances of a prefill or decode replica have its role", "roles"
            )
        self.role = wanted[0]

    def with_role(self, told: Told) -> Told:
        """Return what is told of the engine with the role of the replica."""
        if (role := self.role) is None:
            return told
        instances: Any = tuple(replace(instance, role=role.value) for instance in told.instances)
        return replace(told, instances=instances)

    def described(self, stats: Stats) -> Stats:
        """Return a snapshot with the role of the replica, and what was fetched and given."""
        remote = self._remote
        return replace(
            self.with_role(stats),
            kv_fetched_pages=remote.pages,
            kv_fetched_bytes=remote.bytes,
            kv_fetch_seconds=remote.fetch_seconds,
            kv_fetch_fallbacks=remote.fallbacks,
            kv_given_pages=self._server.pages,
        )


class _EnginePages:
    """The pages of an engine, asked from another loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._pages = engine, engine.kv_pages()

    async def arrive(self, digest: bytes, seconds: float) -> bool:
        return await self._asked(lambda: self._pages.arrive(digest, seconds))

    async def export(self, digests: Sequence[bytes], most: int, summed: bool) -> Export | None:
        return await self._asked(lambda: self._pages.export(digests, most, summed))

    async def _asked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await asyncio.wrap_future(self._engine.ask(work))


class _Ahead:
    """A KVSource of pages that another engine is computing: a fetch waits for the next one, and no request does."""

    def __init__(self, remote: RemoteKV) -> None:
        self._remote = remote

    def find(self, request: Request, digests: Sequence[bytes]) -> int:
        return self._remote.find(request, digests)

    def seconds(self, pages: int) -> float:
        return 0.0

    async def fetch(self, request: Request, digests: Sequence[bytes], start: int) -> KVBuffer | None:
        return await self._remote.fetch(request, digests, start, PATIENCE)
