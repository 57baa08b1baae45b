"""Everything that can be set, as one frozen value."""

from __future__ import annotations

from jaxserve.yamlio import load_yaml, parse_yaml

__all__ = ["load_yaml", "parse_yaml"]
