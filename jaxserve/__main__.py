"""`python -m jaxserve`: the same as the `jaxserve` script."""

from __future__ import annotations

from jaxserve.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
