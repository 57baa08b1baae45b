"""What a server needs of the engines that it has started, wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from jaxserve.config import ServeConfig
from jaxserve.remote.address import Place

CLOSING = 15.0  # seconds in which an engine must close; then its process is killed
PAUSES = (0.0, 1.0, 10.0, 60.0)  # seconds before an engine is started again, after so many failures in a row
LASTING = 60.0  # seconds of service after which an end does not count as a failure in a row


class Engines(Protocol):
    """Engines, one per replica. One that ends is started again, and found through its place."""

    @property
    def places(self) -> Sequence[Place]:
        """Where fronts find the engines."""

    def wait(self) -> None:
        """Wait until all engines are ready. Raises what kept one from starting."""

    def close(self) -> bool:
        """Close all engines; return False if one had to be killed."""


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row; 0: a restart that was asked for."""
    return PAUSES[min(max(failures, 1), len(PAUSES)) - 1]


def own_settings(config: ServeConfig, at: int) -> ServeConfig:
    """Return the settings of one engine: the keys stay with the fronts, and a journal is written for each."""
    journal = config.journal
    if journal is not None and len(config.replica_roles) > 1:
        path = Path(journal)
        journal = str(path.with_name(f"{path.stem}-{at}{path.suffix}"))
    mode = "colocated" if config.prefill_replicas else config.mode  # of a replica that prefills or decodes
    return replace(config, api_key=(), admin_key=(), journal=journal, mode=mode)
