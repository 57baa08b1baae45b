"""Creation of objects by name with options, imported on demand: `name`, or `name:option+option=value`.

Options are keyword arguments of the factory. A bare option is a flag, `no-option` its opposite, and
numbers are converted. Errors say what is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from .api.errors import InvalidValue


def build(table: Mapping[str, str], text: str, what: str, package: str | None, **given: Any) -> Any:
    """Create the object that `table` has under the name in `text`.

    `given` arguments are passed if the factory accepts them. Raises InvalidValue.
    """
    name, _, options = text.strip().partition(":")
    if name not in table:
        close = get_close_matches(name, table, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InvalidValue(f"unknown {what} {name!r}; choose one of {', '.join(sorted(table))}{hint}", what)
    make, fixed = factory(table, name, package), table[name].split(":")[2:]
    return construct(make, "+".join(filter(None, [*fixed, options])), f"{what} {name!r}", what, **given)


def construct(make: Callable[..., Any], options: str, owner: str, what: str, **given: Any) -> Any:
    """Call a factory with the options in `options`, and those of the `given` arguments that it accepts.

    owner: names the factory in errors. Raises InvalidValue.
    """
    taken = inspect.signature(make).parameters
    values = _read(options, {key: parameter for key, parameter in taken.items() if key not in given}, owner, what)
    return make(**values, **{key: value for key, value in given.items() if key in taken})


def shared(
    tables: Sequence[Mapping[str, str]], names: Sequence[str], text: str, owner: str, what: str, package: str | None
) -> list[str]:
    """Distribute the options in `text` over several names. Returns each name with the options it accepts.

    Raises InvalidValue if no name accepts an option.
    """
    taken = [
        inspect.signature(factory(table, name, package)).parameters for table, name in zip(tables, names, strict=True)
    ]
    split: list[list[str]] = [[] for _ in names]
    for part in filter(None, text.split("+")):
        key = part.partition("=")[0].strip().replace("-", "_")
        takers = [
            parts for parts, allowed in zip(split, taken, strict=True) if {key, key.removeprefix("no_")} & set(allowed)
        ]
        if not takers:
            every = {key: parameter for allowed in taken for key, parameter in allowed.items()}
            raise _unknown(part, every, owner, what)
        for taker in takers:
            taker.append(part)
    return [f"{name}:{'+'.join(parts)}" for name, parts in zip(names, split, strict=True)]


def factory(table: Mapping[str, str], name: str, package: str | None) -> Callable[..., Any]:
    """Return the factory of a name. An entry is `module:factory` or `module:factory:options`."""
    module, attribute, *_ = table[name].split(":")
    result: Callable[..., Any] = getattr(import_module(f".{module}", package), attribute)
    return result


def _unknown(part: str, allowed: Mapping[str, inspect.Parameter], owner: str, what: str) -> InvalidValue:
    names = ", ".join(_shown(parameter) for parameter in allowed.values()) or "none"
    return InvalidValue(f"{owner} has no option {part!r}; its options: {names}", what)


def _read(text: str, allowed: Mapping[str, inspect.Parameter], owner: str, what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in filter(None, text.split("+")):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        flag = not equals
        off = flag and key.startswith("no_") and key not in allowed
        key = key.removeprefix("no_") if off else key
        if key not in allowed:
            raise _unknown(part, allowed, owner, what)
        values[key] = _value(allowed[key].default, not off if flag else value.strip(), owner, part, what)
    return values


def _value(default: Any, value: Any, owner: str, part: str, what: str) -> Any:
    """Convert an option to the type of the default."""
    kind: type = bool if isinstance(default, bool) else int if isinstance(default, int) else type(default)
    try:
        if isinstance(value, bool) != (kind is bool):
            raise ValueError
        return value if kind in (bool, str) else _number(value, kind)
    except (TypeError, ValueError, OverflowError):
        number = "a whole number" if kind is int else "a number"
        wanted = "a flag without a value" if kind is bool else "text" if kind is str else number
        raise InvalidValue(f"{owner}: option {part!r} must be {wanted}", what) from None


def _number(text: str, kind: type) -> int | float:
    """Convert a number exactly. Raises ValueError or OverflowError."""
    number = float(text)
    if number != number or (kind is int and number != int(number)):
        raise ValueError
    return int(number) if kind is int else number


def _shown(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return (
        parameter.name
        if default is False
        else f"no-{parameter.name}"
        if default is True
        else (f"{parameter.name}={default}")
    )
