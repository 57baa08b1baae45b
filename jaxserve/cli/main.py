"""`jaxserve COMMAND …`: each command is a module, imported only when it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from jaxserve.cli.flags import TeachingParser
from jaxserve.errors import InvalidValue, JaxserveError
from jaxserve.version import __version__
from jaxserve.yamlio import nearest

# Each module has add_arguments(parser) and main(args) -> exit status.
COMMANDS = {
    "serve": ("jaxserve.cli.serve", "serve a model over HTTP with OpenAI's API"),
    "simulate": ("jaxserve.cli.simulate.command", "simulate policies on a workload, in seconds and without a device"),
    "bench": ("jaxserve.cli.bench", "send load to a running server and report latencies and goodput"),
    "chat": ("jaxserve.cli.chat.command", "talk to a server, and see what was promised beside what was measured"),
    "top": ("jaxserve.cli.top.command", "watch a server: a live table from its metrics"),
    "replay": ("jaxserve.cli.replay", "replay a server's journal, check for equal plans, and simulate the same load"),
    "profile": ("jaxserve.cli.profile", "measure step times of a model on this machine, for the simulator"),
    "fit": ("jaxserve.cli.fit", "fit step-time models to measured steps, and write a latency preset"),
    "plan": (
        "jaxserve.cli.plan.command",
        "find the fewest devices that serve a load within its objectives, or whether a model fits",
    ),
    "compile": ("jaxserve.cli.compile", "make an engine's programs ahead, for a container image or other machines"),
    "distill": ("jaxserve.cli.distill", "train a draft model for speculative decoding"),
    "convert": ("jaxserve.cli.convert", "convert safetensors to an Orbax checkpoint"),
}


def usage() -> str:
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jaxserve COMMAND …",
            "",
            "LLM serving under per-request latency objectives, in JAX.",
            "",
            *lines,
            "",
            "`jaxserve COMMAND --help` shows flags and examples. Start with `jaxserve serve`.",
        ]
    )


def open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams: sockets would take their numbers, and logs go there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def dispatch(command: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command with its flags; invalid settings print one line and return status 2."""
    open_standard_streams()
    module = importlib.import_module(COMMANDS[command][0])
    parser = TeachingParser(prog=prog or f"jaxserve {command}")
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return int(module.main(args))
    except (InvalidValue, FileNotFoundError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except JaxserveError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"jaxserve {__version__}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        print(f"jaxserve: error: unknown command {command!r}; {nearest(command, COMMANDS)}", file=sys.stderr)
        return 2
    return dispatch(command, rest)
