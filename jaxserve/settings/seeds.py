"""The seed from which those of requests without one are derived."""

from __future__ import annotations

import secrets


def request_seed(seed: int | None) -> str:
    """Return `--seed` as a text, or a random one in each process if that is not given."""
    return secrets.token_hex(8) if seed is None else str(seed)
