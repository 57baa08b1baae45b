"""`python -m jaxserve.run`: serve a model over HTTP, with OpenAI's API. The same as `jaxserve serve`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.cli.main import dispatch


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m jaxserve.run`."""
    return dispatch("serve", argv, prog="python -m jaxserve.run")


if __name__ == "__main__":
    raise SystemExit(main())
