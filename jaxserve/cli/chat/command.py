"""`jaxserve chat`: talk to a server in a terminal, and see what its answers took beside what was promised."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxserve.bench.client import Target
from jaxserve.cli.chat.conversation import Conversation, NoAnswer, Reply
from jaxserve.cli.server_flags import add_server, api_key, base_url
from jaxserve.errors import InvalidValue
from jaxserve.report.printable import printable
from jaxserve.yamlio import seconds

DESCRIPTION = "Talk to a jaxserve server, or to any other with OpenAI's API, in a terminal."
EPILOG = """examples:
  jaxserve chat                                          # with the server at http://127.0.0.1:8000
  jaxserve chat --ttft-slo 300ms --tpot-slo 30ms         # what the answers took, beside what was promised
  jaxserve chat --url https://example.com/v1 --model NAME --api-key KEY
  git diff | jaxserve chat --system 'Write a commit message.' > message

In a terminal: Ctrl-C stops an answer, Ctrl-D leaves, a line that ends in \\ goes on in the next one, /help lists the
commands. Standard input that is no terminal is one message; the answer alone goes to standard output.
"""
HELP = """/help             these lines
/clear            begin a new conversation
/ttft TIME        promise the first token within TIME, as in 300ms; off: the server's default
/tpot TIME        the same for the mean time of every further token
/exit             leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one."""
FIELDS = {"ttft": "ttft_slo_ms", "tpot": "tpot_slo_ms"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add_server(parser)
    parser.add_argument("--model", metavar="NAME", help="model to talk to [the first that the server lists]")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--ttft-slo", type=seconds, metavar="TIME", help="TTFT objective, of a jaxserve server")
    parser.add_argument("--tpot-slo", type=seconds, metavar="TIME", help="TPOT objective, of a jaxserve server")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer [the server's limit]")
    parser.add_argument("--temperature", type=float, metavar="X", help="sampling temperature [the server's default]")


def main(args: argparse.Namespace) -> int:
    """Talk until the input ends. Raises InvalidValue for settings that do not fit the server."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):  # a model, and a file that is piped, may hold any character
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    target = Target(base_url(args.url), args.model or "", chat=True, api_key=api_key(args))
    talk = Conversation(target, args.system, {name: value for name, value in sampling.items() if value is not None})
    asyncio.run(talk.meet())
    for name in FIELDS:
        if (value := getattr(args, f"{name}_slo")) is not None:
            promise(talk, name, value)
    chat = Chat(talk, Console(highlight=False), Console(stderr=not sys.stdout.isatty(), highlight=False))
    if not sys.stdin.isatty():
        return 0 if chat.answer(sys.stdin.read().strip()) else 1
    return chat.run(_typed)


def promise(talk: Conversation, name: str, value: float | None) -> None:
    """Set or clear an objective. Raises InvalidValue if the server knows none."""
    if not talk.ours:
        raise InvalidValue(
            f"{name}_slo={value!r}: {printable(talk.target.base_url)} is no jaxserve server, and would ignore it",
            f"{name}_slo",
        )
    talk.objectives.pop(FIELDS[name], None)
    if value is not None:
        talk.objectives[FIELDS[name]] = 1e3 * value


def _typed(prompt: str) -> str:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` history and editing
    return input(prompt)


class Chat:
    """The dialog: typed lines in, answers out. `out` shows answers, `notes` everything else."""

    def __init__(self, talk: Conversation, out: Console, notes: Console) -> None:
        self._talk = talk
        self._out = out
        self._notes = notes
        self._shown = False  # a piece of the answer has been shown
        self._thinking = False  # the last piece was thinking

    def run(self, read: Callable[[str], str]) -> int:
        """Answer lines from `read` until it raises EOFError, or a command leaves."""
        self._note(f"{self._talk.target.model} at {self._talk.target.base_url}. /help lists the commands.")
        while True:
            try:
                line = self._line(read)
            except EOFError:
                self._note("")
                return 0
            except KeyboardInterrupt:
                self._note("\nCtrl-D or /exit leaves")
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.answer(line)

    def _line(self, read: Callable[[str], str]) -> str:
        """Return what was typed, with continued lines."""
        lines = [read("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(read(". "))
        return "\n".join(lines).strip()

    def _command(self, line: str) -> None:
        name, _, value = line[1:].partition(" ")
        if name == "help":
            self._note(HELP)
        elif name == "clear":
            self._talk.clear()
            self._note("a new conversation")
        elif name in FIELDS:
            self._promise(name, value.strip())
        else:
            self._note(f"/{name} is no command: /help lists them", "red")

    def _promise(self, name: str, value: str) -> None:
        try:
            if not value:
                raise InvalidValue(f"/{name} needs a time, as in /{name} 300ms, or off", name)
            promise(self._talk, name, None if value == "off" else seconds(value))
        except ValueError as error:
            self._note(str(error), "red")

    def answer(self, text: str) -> bool:
        """Send a message and show its answer and its times. Return whether there was one."""
        if not text:
            self._note("the message is empty", "red")
            return False
        self._shown = self._thinking = False
        try:
            reply = asyncio.run(self._talk.ask(text, self._show))
        except KeyboardInterrupt:
            self._note("\nstopped", "yellow")
            return False
        except NoAnswer as error:
            self._note(("\n" if self._shown else "") + str(error), "red")
            return False
        self._out.print()
        self._notes.print(measured(reply))
        return True

    def _show(self, piece: str, thinking: bool) -> None:
        if thinking != self._thinking:
            self._out.print(end="" if thinking else "\n\n")
        self._shown, self._thinking = True, thinking
        self._out.print(Text(printable(piece), "dim italic" if thinking else ""), end="", soft_wrap=True)

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(Text(printable(text), style), soft_wrap=True)


def measured(reply: Reply) -> Text:
    """Return the times of an answer beside what was promised."""
    parts: list[Text] = []
    for name, took in (("TTFT", reply.ttft), ("TPOT", reply.tpot)):
        if took is not None:
            parts.append(_beside(name, took, reply.promised.get(f"{name.lower()}_slo_ms")))
    parts.append(Text(f"{reply.count} {'tokens' if reply.tokens else 'pieces'}", "dim"))
    return Text("   ").join(parts)


def _beside(name: str, took: float, promised: Any) -> Text:
    text = Text(f"{name} {_time(took)}", "dim")
    if isinstance(promised, int | float):
        late = took - promised / 1e3
        text.append(f" of {_time(promised / 1e3)} promised" + (f", late by {_time(late)}" if late > 0 else ""))
        text.style = "red" if late > 0 else "green"
    return text


def _time(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.2f} s"
