"""The command line of a script that makes several tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def run(about: str | None, makers: Sequence[Callable[[], Any]]) -> int:
    """Make the tables named on the command line, or all."""
    tables = {maker.__name__: maker for maker in makers}
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(tables)} [all]")
    chosen = parser.parse_args().tables or list(tables)
    unknown = [name for name in chosen if name not in tables]
    if unknown:
        parser.error(f"unknown table {unknown[0]!r}; choose from {', '.join(tables)}")
    for name in chosen:
        tables[name]()
    return 0
