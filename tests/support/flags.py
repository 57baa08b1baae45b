"""Command lines of the server."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.cli.flags import TeachingParser, add_arguments, config_of
from jaxserve.config import ServeConfig


def parsed(words: Sequence[str]) -> ServeConfig:
    """Return the settings that `jaxserve serve` takes from these flags."""
    parser = TeachingParser(prog="serve")
    add_arguments(parser)
    return config_of(parser.parse_args(words))
