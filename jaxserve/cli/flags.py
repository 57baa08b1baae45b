"""Command-line flags from the fields of `ServeConfig`, and helpful errors for unknown flags."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import typing
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
    "scheduling": "scheduling and objectives",
    "memory": "KV cache",
    "server": "HTTP server",
    "operations": "operations",
}
_METAVARS = {int: "N", float: "X", size: "SIZE", seconds: "TIME", objective: "TIME|auto"}


class TeachingParser(argparse.ArgumentParser):
    """An argument parser that suggests the closest flag, or our name of another engine's flag."""

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("allow_abbrev", False)
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **more)

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
        return f"{word}: did you mean {close[0]}?" if close else f"{word}: see --help for all flags"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config`, the positional model, and a flag for every field of ServeConfig."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file with these settings by name; flags override it")
    groups = {name: parser.add_argument_group(text) for name, text in _GROUPS.items()}
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
        more |= {"nargs": "+"} if typing.get_origin(kind) is tuple else {"type": partial(_converted, hint)}
    group.add_argument("--" + name.replace("_", "-"), **more)


def _converted(hint: Any, text: str) -> Any:
    try:
        return convert(text, hint)
    except InvalidValue as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
