"""The engines of a server in a Ray cluster: `EngineProcesses` for several machines."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ray

from jaxserve.config import ServeConfig
from jaxserve.errors import JaxserveError
from jaxserve.ray import cluster
from jaxserve.ray.replica import RayReplica
from jaxserve.remote.address import Address, Place
from jaxserve.remote.engines import LASTING, own_settings, pause
from jaxserve.remote.nodes import devices_of, lay_out

log = logging.getLogger(__name__)


class RayEngines:
    """One engine per replica, each in a placement group of its own. One that ends is started again."""

    def __init__(self, config: ServeConfig) -> None:
        """Join the cluster of `config.ray` (None: this process has joined one) and reserve devices.

        Raises InvalidValue if the cluster cannot be reached, or its nodes are not able.
        """
        self._joined = config.ray is not None
        if config.ray is not None:
            cluster.connect(config.ray, cpus=config.replicas * devices_of(config))
        self._folder = tempfile.mkdtemp(prefix="jaxserve-ray-")  # only this user may enter it
        self._replicas: list[RayReplica] = []
        self._closing = threading.Event()
        try:
            self._replicas = self._reserved(config)
        except BaseException:
            self.close()
            raise

    def _reserved(self, config: ServeConfig) -> list[RayReplica]:
        found = cluster.nodes()
        kind = cluster.kind_of(found)
        able = [node for node in found if node.resources.get(kind, 0) >= 1]
        shares = lay_out(config, kind, {node.name: int(node.resources[kind]) for node in able})
        model = cluster.model_folder(config.model)
        cluster.check_nodes(able, model)
        config = replace(config, model=model or config.model)
        host = "127.0.0.1" if config.ray == cluster.LOCAL else None
        return [
            RayReplica(own_settings(config, at), self._place(at), kind, share, host) for at, share in enumerate(shares)
        ]

    def _place(self, at: int) -> Place:
        return Place(Address(listed=str(Path(self._folder) / str(at))), secrets.token_bytes(32), f"replica {at}")

    @property
    def places(self) -> tuple[Place, ...]:
        """Where fronts find the engines."""
        return tuple(one.place for one in self._replicas)

    def wait(self) -> None:
        """Wait until all engines are ready. Raises what kept one from starting."""
        for one in self._replicas:
            one.placed()
        with ThreadPoolExecutor(len(self._replicas)) as beside:
            for started in [beside.submit(one.start, self._closing.is_set) for one in self._replicas]:
                started.result()
        for at, one in enumerate(self._replicas):
            threading.Thread(target=self._keep, args=(one,), name=f"jaxserve-keeper-{at}", daemon=True).start()

    def _keep(self, one: RayReplica) -> None:
        """Start an engine again whenever it has ended, until `close`."""
        failures, begun, closing, name = 0, time.monotonic(), self._closing.is_set, one.place.name
        while (why := one.ended(closing)) is not None:
            if not why:
                failures = 0
                log.info("%s starts again, as asked", name)
            else:
                failures = 1 if time.monotonic() - begun > LASTING else failures + 1
                log.error("%s ended (%s); it starts again in %g s", name, why, pause(failures))
            while not self._again(one, failures):
                failures += 1
                if closing():
                    return
            begun = time.monotonic()

    def _again(self, one: RayReplica, failures: int) -> bool:
        """Start an engine again after a pause; return whether it serves."""
        if self._closing.wait(pause(failures)):
            return False
        try:
            one.stop()
            one.start(self._closing.is_set)
        except (JaxserveError, ray.exceptions.RayError) as error:
            if not self._closing.is_set():
                log.error("%s did not start: %s", one.place.name, error)
            return False
        log.info("%s serves again", one.place.name)
        return True

    def close(self) -> bool:
        """Close all engines, and leave the cluster; return False if one had to be killed."""
        self._closing.set()
        closers: list[Callable[[], bool]] = [one.close for one in self._replicas]
        with ThreadPoolExecutor(max(1, len(closers))) as beside:
            closed = [one.result() for one in [beside.submit(close) for close in closers]]
        if self._joined:
            ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        return all(closed)
