"""`python -m jaxserve.run`: serve a model with OpenAI's API, like `jaxserve serve`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.cli.main import dispatch


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jaxserve serve` with the arguments of `python -m jaxserve.run`."""
    return dispatch("serve", argv, prog="python -m jaxserve.run")


if __name__ == "__main__":
    raise SystemExit(main())
