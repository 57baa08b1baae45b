"""`jaxserve compile`: make the programs of an engine ahead, for a container image or for other machines."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.cli import flags
from jaxserve.errors import InvalidValue
from jaxserve.report.progress import bar

DESCRIPTION = """Make the programs of an engine ahead. A server that starts with the same settings on a machine of the
same kind then loads them: it traces and compiles nothing."""
EPILOG = """example:
  jaxserve compile --model Qwen/Qwen3-8B --mesh 1x2 --out programs
then, with the digest that it printed
  jaxserve serve --model Qwen/Qwen3-8B --mesh 1x2 --programs programs --digest SHA256

All flags of `jaxserve serve` that affect a program apply, and must be the same there.
"""


def add_arguments(parser: flags.TeachingParser) -> None:
    parser.description, parser.epilog, parser.usage = DESCRIPTION, EPILOG, "%(prog)s [MODEL] --out DIR [flags]"
    parser.first = ("out", "model", "mesh", "quantization", "max_model_len", "max_num_seqs", "config")
    group = parser.add_argument_group("output")
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="an empty folder, or one to be made")
    flags.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Compile. Raises InvalidValue for invalid settings, and for those whose programs cannot be kept."""
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidValue(f"out={str(out)!r} must be an empty folder, or one to be made", "out")
    config = flags.config_of(args)

    from jaxserve.engine.startup import assemble  # imports jax, so only now

    with bar("compiling") as progress:
        built = assemble.build(config, progress)
    kept = None if built.ladder is None else built.ladder.kept
    if kept is None:
        raise InvalidValue("programs with logits processors are not kept: they are code of other packages", "out")
    digest = kept.ship(out)
    files = list(out.iterdir())
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files) - 1} programs, {size / 1e6:.1f} MB, in {out}. Serve with the same settings and\n"
          f"  --programs {out} --digest {digest}")  # fmt: skip
    return 0
