"""A named jitted function, and the executables of it that an instance has ready."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import jax

from jaxserve.engine.programs import serialize

T = TypeVar("T")
Key = tuple[tuple[int, ...] | None, ...]


class Program:
    """A jitted function. Calls run the executable that was installed for their shapes, or else compile one.

    Equal instances share the function, and with it its traces. An executable belongs to the devices of
    one instance, so each instance calls a program of its own (`bound`).
    """

    def __init__(self, function: Callable[..., Any], name: str, out: Any, donate: tuple[int, ...] = ()) -> None:
        """out: shardings of the results. donate: positions of donated arguments."""

        def named(*args: Any) -> Any:
            return function(*args)

        named.__name__ = named.__qualname__ = self.name = name
        self._jit = jax.jit(named, out_shardings=out, donate_argnums=donate)
        self._executables: dict[Key, jax.stages.Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        return self._executables.get(_key(args), self._jit)(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self._jit.lower(*args)

    def install(self, args: tuple[Any, ...], executable: jax.stages.Compiled) -> None:
        """Run `executable` in calls with arguments of the shapes of `args`."""
        self._executables[_key(args)] = executable

    def results(self, *args: Any) -> Any:
        """Return abstract results, without tracing if the executable is installed."""
        ready = self._executables.get(_key(args))
        return jax.eval_shape(self._jit, *args) if ready is None else serialize.results(ready)

    def bound(self) -> Program:
        """Return the same function without executables."""
        made = copy(self)
        made._executables = {}
        return made


def _key(args: tuple[Any, ...]) -> Key:
    """Return the shapes of the arguments that are arrays: within an instance nothing else differs between calls."""
    return tuple([getattr(arg, "shape", None) for arg in args])


def bound(holder: T) -> T:
    """Copy an object whose attributes are programs, or dicts of them, for one instance."""
    copied = copy(holder)
    for name, value in vars(holder).items():
        if isinstance(value, Program):
            setattr(copied, name, value.bound())
        elif isinstance(value, dict):
            setattr(
                copied,
                name,
                {key: entry.bound() if isinstance(entry, Program) else entry for key, entry in value.items()},
            )
    return copied
