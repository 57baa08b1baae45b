"""The engines of a server in a Ray cluster: `EngineProcesses` for several machines."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from jaxserve.config import ServeConfig
from jaxserve.fleet.nodes import Shares, devices_of, lay_out
from jaxserve.fleet.supervisor import Engines, own_settings
from jaxserve.kv.share import KVShare
from jaxserve.ray import cluster
from jaxserve.ray.replica import RayReplica
from jaxserve.wire.address import Address, Place

log = logging.getLogger(__name__)


class RayEngines(Engines):
    """One engine per replica, each in a placement group of its own."""

    def __init__(self, config: ServeConfig) -> None:
        """Join the cluster of `config.ray` (None: this process has joined one) and reserve devices.

        Raises InvalidValue if the cluster cannot be reached, or its nodes are not able.
        """
        super().__init__(len(config.replica_roles))
        self._joined = config.ray is not None
        if config.ray is not None:
            cluster.connect(config.ray, cpus=config.most_replicas * devices_of(config))
        self._folder = tempfile.mkdtemp(prefix="jaxserve-ray-")  # only this user may enter it
        try:
            model = cluster.model_folder(config.model)
            shares = _shares(config, model)
            config = replace(config, model=model or config.model)
            host = "127.0.0.1" if config.ray == cluster.LOCAL else None
            more = partial(self._more, config)
            replicas = [
                RayReplica(own_settings(config, at), self._place(at), more, host, kv)
                for at, kv in enumerate(KVShare.each(config))
            ]
            self._keep(replicas)
            for replica, own in zip(replicas, shares, strict=False):
                replica.reserve(*own)
        except BaseException:
            self.close()
            raise

    def _more(self, config: ServeConfig) -> tuple[str, Shares]:
        """Return the devices of one more replica. Raises InvalidValue if the cluster has too few."""
        running = sum(keeper.wanted for keeper in self.keepers)
        return _shares(replace(config, replicas=running, max_replicas=None, min_replicas=None), config.model)[-1]

    def _place(self, at: int) -> Place:
        return Place(Address(listed=str(Path(self._folder) / str(at))), secrets.token_bytes(32), f"replica {at}")

    def close(self) -> bool:
        """Close all engines, and leave the cluster; return False if one had to be killed."""
        closed = super().close()
        if self._joined:
            ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        return closed


def _shares(config: ServeConfig, model: str | None) -> list[tuple[str, Shares]]:
    """Return the kind of devices of each replica, and their numbers on nodes. Raises InvalidValue."""
    members = cluster.nodes()
    kind = cluster.kind_of(members)
    able = [node for node in members if node.resources.get(kind, 0) >= 1]
    shares = lay_out(config, kind, {node.name: int(node.resources[kind]) for node in able})
    cluster.check_nodes(able, cluster.model_folder(model))
    return [(kind, share) for share in shares]
