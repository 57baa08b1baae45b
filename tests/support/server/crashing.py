"""Front processes that end in some way, for tests of what their parent does. Imports little: each front does."""

from __future__ import annotations

import os
import signal
from typing import Any

from jaxserve.errors import InvalidValue


def refuse(index: int, config: Any, start: Any, pipe: Any, sock: Any) -> None:
    """End with a reason."""
    from jaxserve.fleet.messages import Failure

    pipe.send(Failure.of(InvalidValue("no tokenizer", "tokenizer")))


def die(index: int, config: Any, start: Any, pipe: Any, sock: Any) -> None:
    """End without one."""
    os._exit(9)


def serve_and_die(index: int, config: Any, start: Any, pipe: Any, sock: Any) -> None:
    """End as soon as it serves."""
    pipe.send(None)
    os.kill(os.getpid(), signal.SIGKILL)


def die_beside_another(index: int, config: Any, start: Any, pipe: Any, sock: Any) -> None:
    """Serve as the first front until SIGTERM, and never as the second."""
    if index:
        os._exit(9)
    pipe.send(None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    signal.pause()
