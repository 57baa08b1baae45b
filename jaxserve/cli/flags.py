"""Command-line flags from the fields of `ServeConfig`, and helpful errors for unknown flags."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.config import ServeConfig
from jaxserve.errors import InvalidValue
from jaxserve.settings.other_engines import flag_hint
from jaxserve.settings.tiers import objective
from jaxserve.yamlio import choices, convert, hints_of, parser_of, parts, seconds, size

_GROUPS = {
    "model": "model",
    "devices": "devices",
    "kernels": "kernels",
    "objectives": "objectives",
    "scheduling": "scheduling",
    "memory": "KV cache",
    "startup": "startup",
    "http": "HTTP server",
    "keys": "keys and limits",
    "tls": "TLS and CORS",
    "chat": "model names, templates and parsers",
    "replicas": "processes and replicas",
    "kv-transfer": "KV transfer",
    "ray": "Ray",
    "operations": "logs, metrics and traces",
}
_METAVARS = {int: "N", float: "X", size: "SIZE", seconds: "TIME", objective: "TIME|auto"}


class _Help(argparse.Action):
    """`--help`, `--help=all` and `--help=GROUP`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.page(values), end="")
        parser.exit()


class TeachingParser(argparse.ArgumentParser):
    """An argument parser that suggests the closest flag, or our name of another engine's flag.

    With `first`, `--help` shows only these flags, in this order, and how to see the others.
    """

    def __init__(self, *args: Any, add_help: bool = True, **more: Any) -> None:
        more.setdefault("allow_abbrev", False)
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        more["add_help"] = False  # that of argparse has no groups
        super().__init__(*args, **more)
        self.first: tuple[str, ...] = ()
        self.first_epilog: str | None = None  # examples of the short page, if those of the whole one are many
        self._keys: dict[str, str] = {}  # what --help=GROUP takes, by the title of the group
        if add_help:
            text = "show this help; all: every flag; GROUP: the flags of one group"
            self.add_argument(
                "-h", "--help", action=_Help, nargs="?", metavar="GROUP", default=argparse.SUPPRESS, help=text
            )

    def keyed_group(self, key: str, title: str) -> Any:
        """Add a group of flags that `--help=KEY` shows."""
        self._keys[title] = key
        return self.add_argument_group(title)

    def page(self, wanted: str | None) -> str:
        """Return a page of help: the first flags (None), all, or those of a group."""
        if wanted == "all" or (wanted is None and not self.first):
            return self.format_help()
        groups = {self._keys.get(group.title or "", group.title or ""): group for group in self._action_groups[2:]}
        if wanted is None:
            return self._short(list(groups))
        if wanted not in groups:
            self.exit(2, f"{self.prog}: error: help={wanted!r} must be all, {', '.join(groups)}, or left out\n")
        formatter = self._get_formatter()
        formatter.start_section(groups[wanted].title)
        formatter.add_arguments(groups[wanted]._group_actions)
        formatter.end_section()
        return formatter.format_help()

    def _short(self, groups: list[str]) -> str:
        by_name = {action.dest: action for action in self._actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("the flags that are set first")
        formatter.add_arguments([_shortened(by_name[name]) for name in self.first])
        formatter.end_section()
        names = textwrap.fill(", ".join(groups), 76, initial_indent="  ", subsequent_indent="  ")
        count = sum(bool(action.option_strings) for action in self._actions) - 1
        formatter.add_text(f"--help=all shows all {count} flags, --help=GROUP those of a group:\n{names}")
        formatter.add_text(self.first_epilog or self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        unknown = [word.split("=")[0] for word in message.rpartition(":")[2].split() if word.startswith("-")]
        if not message.startswith("unrecognized arguments"):
            unknown = []
        for word in unknown:
            message += "\n  " + self._hint(word)
        self.print_usage(sys.stderr) if not unknown else None
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _hint(self, word: str) -> str:
        elsewhere = flag_hint(word)
        if elsewhere is not None:
            return f"{word}: {elsewhere}"
        close = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
        return f"{word}: did you mean {close[0]}?" if close else f"{word}: see --help=all for all flags"


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return an action with the first sentence of its help, and its default."""
    short, text = copy.copy(action), action.help or ""
    default = re.search(r" \[[^]]*\]$", text)
    first = re.match(r".{10,}?(?=[.;:] |\.?$)", text.removesuffix(default[0] if default else ""))
    short.help = (first[0] if first else text) + (default[0] if default else "")
    return short


def add_flags(group: Any, *rows: tuple[str, Any, Any, str | None, str]) -> None:
    """Add flags from rows of name, kind, default, metavar and help text.

    kind: what parses a value (None: nothing), `bool` for a switch, `list` for a flag that may be repeated,
    BooleanOptionalAction, or the allowed values.
    """
    for name, kind, default, metavar, text in rows:
        more: dict[str, Any] = {"default": default, "help": text or None}
        if kind is bool:
            more |= {"action": "store_true", "default": False}
        elif kind is argparse.BooleanOptionalAction:
            more["action"] = kind
        elif kind is list:
            more |= {"action": "append", "default": [], "metavar": metavar}
        else:
            more |= {"type" if kind is None or callable(kind) else "choices": kind, "metavar": metavar}
        group.add_argument(name, **more)


def add_arguments(parser: TeachingParser) -> None:
    """Add `--config`, the positional model, and a flag for every field of ServeConfig."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings by name; flags override it")
    groups = {key: parser.keyed_group(key, title) for key, title in _GROUPS.items()}
    for field in dataclasses.fields(ServeConfig):
        add_setting(groups[field.metadata["group"]], field.name)


def add_setting(group: Any, name: str) -> None:
    """Add the flag of one field of ServeConfig."""
    field, hint = ServeConfig.__dataclass_fields__[name], hints_of(ServeConfig)[name]
    text, default, kind = field.metadata["help"].replace("%", "%%"), field.default, parts(hint)[0]
    if default is True or not (default is None or default is False or default == ()):
        text += f" [{'on' if default is True else default}]"
    more: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        more["action"] = argparse.BooleanOptionalAction
    elif choices(hint):
        more["choices"] = choices(hint)
    else:
        more["metavar"] = field.metadata.get("metavar") or _METAVARS.get(parser_of(hint) or kind, "TEXT")
        more |= {"nargs": "+"} if typing.get_origin(kind) is tuple else {"type": checked(partial(convert, hint=hint))}
    group.add_argument("--" + name.replace("_", "-"), **more)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of flags that says why a value is invalid."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except InvalidValue as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ServeConfig that were given as flags."""
    names = hints_of(ServeConfig)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in vars(args).items() if k in names}


def config_of(args: argparse.Namespace) -> ServeConfig:
    """Merge flags and the `--config` file into settings. Raises InvalidValue."""
    given = settings_of(args)
    if args.model_tag is not None:
        if given.get("model", args.model_tag) != args.model_tag:
            raise InvalidValue(f"model is given twice: {args.model_tag!r} and --model {given['model']!r}", "model")
        given["model"] = args.model_tag
    if args.config is not None and not Path(args.config).is_file():
        raise InvalidValue(
            f"config={args.config!r} is not a file: give a YAML file with settings by name, such as "
            "configs/serve/example.yaml",
            "config",
        )
    return ServeConfig.load(args.config, **given)
