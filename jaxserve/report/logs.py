"""Logging of a process that serves."""

from __future__ import annotations

import logging


def log_to_stderr(level: str) -> None:
    """Log jaxserve and uvicorn at `level`; other libraries log warnings only, unless `level` is debug."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger().setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    for name in ("jaxserve", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
