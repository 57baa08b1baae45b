"""A Ray Serve application: HTTP in its replicas, engines placed by one deployment beside them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from ray import serve

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue, short
from jaxserve.fleet.board import Board, Scale, ScaleState
from jaxserve.fleet.replicas import Replicas
from jaxserve.fleet.scaler import ReplicaScaler
from jaxserve.models.source import check_names, find_tokenizer
from jaxserve.ray.engines import RayEngines
from jaxserve.server.app import create_app
from jaxserve.server.fronts import begin_process
from jaxserve.server.keys import Keys
from jaxserve.server.limits import load_limits
from jaxserve.server.main import check_processes
from jaxserve.server.service import Service
from jaxserve.settings.seeds import request_seed
from jaxserve.wire.address import Address, Place

log = logging.getLogger(__name__)

LEARNING = 0.5  # seconds between two looks at where the engines are
WORDS = {"true": True, "false": False}  # `serve run APP name=true` gives strings


class Known(NamedTuple):
    """What fronts need to know of the engines."""

    places: list[tuple[str, bytes, str]]  # the address, key and name of each
    scaling: ScaleState | None  # None: their number is fixed


def settings_of(given: Any) -> ServeConfig:
    """Return the settings that `build_app` was given. Raises InvalidValue."""
    if isinstance(given, ServeConfig):
        return given
    if isinstance(given, str | Path):
        return ServeConfig.load(given)
    if isinstance(given, Mapping):
        values = {str(name).replace("-", "_"): value for name, value in given.items()}
        for name, value in values.items():
            if isinstance(value, list):
                values[name] = tuple(value)
            elif isinstance(value, str) and value in WORDS:
                values[name] = WORDS[value]
        return ServeConfig.load(values.pop("config", None), **values)
    raise InvalidValue(
        f"settings={short(given)} must be a ServeConfig, a mapping or the path of a YAML file", "settings"
    )


def application(given: Any) -> Any:
    """Return the application of `build_app`."""
    config = settings_of(given)
    for name in ("host", "port"):
        if getattr(config, name) != getattr(ServeConfig, name):
            raise InvalidValue(
                f"{name}={getattr(config, name)!r}: Ray Serve listens, set its http_options.{name} instead", name
            )
    check_names(config)
    keys = Keys.of(config)
    check_processes(config, keys)
    load_limits(config, keys.names)
    config = replace(config, ray=None)
    engines = serve.deployment(EnginesDeployment).options(
        name="Engines",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        logging_config={"enable_access_log": False},  # fronts look twice a second
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name="Front",
        num_replicas=config.api_server_count,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.max_connections,
        graceful_shutdown_timeout_s=config.drain_timeout,
    )
    return front.bind(config, engines.bind(config))


class EnginesDeployment:
    """The engines of an application. They end with this replica."""

    def __init__(self, config: ServeConfig) -> None:
        self._engines = RayEngines(config)
        self._engines.wait()
        self._scaler = None if config.max_replicas is None else ReplicaScaler(self._engines, config)
        if self._scaler is not None:
            self._scaler.start()

    def known(self, asked: Scale | None = None) -> Known:
        """Return where the engines are now. asked: a number of replicas that a front was asked for."""
        if self._scaler is None:
            state = None
        else:
            state = self._scaler.board.state()
            if asked is not None:
                self._scaler.board.ask(asked)
        return Known([(str(place.address), place.key, place.name) for place in self._engines.places], state)

    def __del__(self) -> None:
        scaler: ReplicaScaler | None = getattr(self, "_scaler", None)
        if scaler is not None:
            scaler.close()
        if hasattr(self, "_engines"):
            self._engines.close()


class Front:
    """An HTTP replica: the routes of `jaxserve serve`, for engines elsewhere in the cluster."""

    async def __init__(self, config: ServeConfig, engines: Any) -> None:  # type: ignore[misc]  # as Serve allows
        begin_process(config)
        tokenizer = asyncio.ensure_future(asyncio.to_thread(find_tokenizer, config))
        self._engines = engines
        self._folder = Path(tempfile.mkdtemp(prefix="jaxserve-front-"))
        known: Known = await engines.known.remote()
        self._keys = [key for _, key, _ in known.places]
        self._stale = False
        self._board = Board(self._folder)
        self._write(known)
        places = [Place(self._address(at), key, name) for at, (_, key, name) in enumerate(known.places)]
        own = serve.get_replica_context().replica_id.unique_id
        routing, fronts = config.replica_routing, config.api_server_count
        partly = config.max_replicas is not None
        replicas = await Replicas.connect(places, f"{request_seed(config.seed)}.{own}", routing, fronts, partly=partly)
        self._service = Service(replicas, await tokenizer, config)
        replicas.on_continued = self._service.metrics.continued
        self._learning = asyncio.ensure_future(self._learn())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._service)

    def _address(self, replica: int) -> Address:
        return Address(listed=str(self._folder / str(replica)))

    def _write(self, known: Known) -> None:
        for at, (address, _, _) in enumerate(known.places):
            if ":" in address:
                self._address(at).publish(Address.parse(address))
            else:
                self._address(at).vacate()
        if known.scaling is not None:
            self._board.publish(known.scaling)

    async def _learn(self) -> None:
        """Keep the addresses that connections are made to."""
        while True:
            await asyncio.sleep(LEARNING)
            try:
                known: Known = await self._engines.known.remote(self._board.asked())
            except Exception as error:  # whatever Serve raises while the deployment is away
                log.warning("the engines' deployment does not answer: %s", error)
                continue
            self._stale = [key for _, key, _ in known.places] != self._keys
            self._write(known)

    def check_health(self) -> None:
        """Let Serve replace this replica if all engines are new: they have new keys."""
        if self._stale:
            raise RuntimeError("the engines have been started anew")

    async def __del__(self) -> None:
        if hasattr(self, "_learning"):
            self._learning.cancel()
            self._service.close()
            self._service.engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)
