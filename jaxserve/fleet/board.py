"""What the process that starts engines, and the fronts, tell each other: two files in the folder that they share."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from jaxserve.errors import InvalidValue
from jaxserve.whole_file import write_whole

STATE, ASKED = "replicas.json", "scale.json"


class ScaleState(msgspec.Struct, frozen=True):
    """How many replicas run, and why. Writer: the process that starts engines."""

    least: int
    most: int
    wanted: int
    fixed: int | None  # the number that was asked for; None: it follows the load
    standing: tuple[str, ...]  # of each replica: ready, starting, draining or stopped
    startup_seconds: float  # of the slowest last start
    failure: str | None = None  # why a replica that is wanted did not start


class Scale(msgspec.Struct, frozen=True):
    """What a front asks for."""

    replicas: int | None  # None: as the load needs


class Board:
    """The files. What is written last holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def publish(self, state: ScaleState) -> None:
        write_whole(self._folder / STATE, msgspec.json.encode(state))

    def state(self) -> ScaleState | None:
        """Return how many replicas run; None: their number is fixed."""
        with suppress(FileNotFoundError):
            return msgspec.json.decode((self._folder / STATE).read_bytes(), type=ScaleState)
        return None

    def ask(self, scale: Scale) -> None:
        write_whole(self._folder / ASKED, msgspec.json.encode(scale))

    def asked(self) -> Scale | None:
        """Return what was asked for since the last call."""
        taken = self._folder / f"{ASKED}.taken"
        with suppress(FileNotFoundError):
            (self._folder / ASKED).replace(taken)
            return msgspec.json.decode(taken.read_bytes(), type=Scale)
        return None


def ask(board: Board | None, replicas: int | None) -> None:
    """Ask for a number of replicas; None: as the load needs. Raises InvalidValue."""
    state = None if board is None else board.state()
    if board is None or state is None:
        raise InvalidValue("the number of replicas is fixed: serve with --max-replicas", "replicas")
    if replicas is not None and not state.least <= replicas <= state.most:
        raise InvalidValue(
            f"replicas={replicas} must be {state.least} (min_replicas) to {state.most} (max_replicas), or null for as "
            "many as the load needs",
            "replicas",
        )
    board.ask(Scale(replicas))
