"""Test servers: one with a real engine for the whole session, and servers with an engine double on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.fleet.remote_engine import RemoteEngine
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from jaxserve.wire.address import Address
from tests.support import workers
from tests.support.server.live import ADMIN, ALONE, SMALL, Live
from tests.support.timing import PATIENCE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests of the session's engine outside of its group: another process would start that engine again."""
    users = {item.nodeid.partition("::")[0] for item in items if "engine" in getattr(item, "fixturenames", ())}
    for path in users:
        if path.startswith("tests/server/") and workers.group(path) != "server":
            raise pytest.UsageError(
                f"{path} uses the session's engine, so it belongs to the group `server` of {workers.__name__}"
            )


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> None:
    """Keep compiled programs between files, since the session's engine stays alive and counts compilations."""


@pytest.fixture(autouse=True, scope="session")
def _few_mappings(compiled_is_let_go: Callable[[int], None]) -> None:
    """Forget compiled programs before the first engine only: engines here stay alive and count compilations."""
    compiled_is_let_go(10_000)


@pytest.fixture(autouse=True)
def _statuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give refusals of streams their own status code also on a slow machine."""
    monkeypatch.setattr("jaxserve.server.sse.PATIENCE", PATIENCE)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(jaxserve.demo.model_path())


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A real engine: the demo model on one prefill and one decode instance."""
    from jaxserve.engine.engine import Engine

    made = Engine.start(ServeConfig.load(mesh="2x1", max_num_queued_reqs=200, **SMALL))
    yield made
    made.close()


@pytest.fixture(scope="session")
def assembled() -> Callable[[str], Any]:
    """A function that returns warm executors for a mesh, made once. One engine at a time may serve on them."""
    from jaxserve.engine.startup.assemble import assemble

    @cache
    def made(mesh: str) -> Any:
        return assemble(ServeConfig.load(mesh=mesh, **(ALONE if mesh == "1x1" else SMALL)))

    return made


@pytest.fixture(scope="session")
def live(engine: Any, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with the real engine, connected as to one in another process."""
    config = ServeConfig.load(mesh="2x1", admin_key=(ADMIN,), **SMALL)
    from jaxserve.fleet.engine_server import EngineServer

    key = b"secret"
    server = EngineServer(engine, key)
    address = server.start(Address(path=str(tmp_path_factory.mktemp("engine") / "socket")))

    async def service() -> Service:
        return Service(await RemoteEngine.connect(address, key), tokenizer, config)

    made = Live(service, engine)
    yield made
    made.stop()
    server.close()


@pytest.fixture(scope="session")
def _shared(tokenizer: Tokenizer) -> Iterator[Callable[[int], Live]]:
    """A function that returns a server with an engine double by the context of its model, made once."""
    from tests.support.server.double import Double

    made: dict[int, Live] = {}

    def of(context: int) -> Live:
        if context not in made:
            service = Service(Double(max_model_len=context), tokenizer, ServeConfig.load(disable_log_stats=True))
            made[context] = Live(service)
        made[context].quiet()
        made[context].engine.submitted.clear()
        return made[context]

    yield of
    for one in made.values():
        one.stop()


def unchanged(one: Live) -> Iterator[Live]:
    yield one
    assert one.engine.healthy and one.engine.usual and not one.service.draining, "use `fake` for changes"


@pytest.fixture
def plain(_shared: Callable[[int], Live]) -> Iterator[Live]:
    """A server with an engine double, shared by tests that change neither. Starting and stopping one takes 0.3 s."""
    yield from unchanged(_shared(256))


@pytest.fixture
def roomy(_shared: Callable[[int], Live]) -> Iterator[Live]:
    """The same for long prompts."""
    yield from unchanged(_shared(8000))


def doubles(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    from tests.support.server.double import Double

    made: list[Live] = []

    def start(config: dict[str, Any] | None = None, own: Tokenizer | None = None, **more: Any) -> Live:
        settings = {"disable_log_stats": True, **(config or {})}
        made.append(Live(Service(Double(**more), own or tokenizer, ServeConfig.load(**settings))))
        return made[-1]

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def fake(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """A factory of servers with an engine double: `fake(delay=0.01)`, with settings as `config=dict(…)`."""
    yield from doubles(tokenizer)


@pytest.fixture(scope="module")
def fakes(tokenizer: Tokenizer) -> Iterator[Callable[..., Live]]:
    """The same for servers that the tests of a file share."""
    yield from doubles(tokenizer)
