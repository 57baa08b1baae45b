"""Logits processors of other packages, found by their entry points and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.programs.processors import Processor
from jaxserve.errors import InvalidValue
from jaxserve.sched.api.params import PLAIN_ARGUMENT

GROUP = "jaxserve.logits_processors"
SETTING = "logits_processors"


def load(names: Sequence[str], vocab: int) -> dict[str, Processor]:
    """Load the processors with these names, for logits of `vocab` tokens.

    Raises InvalidValue, naming the processor, if no package or several declare it, or it cannot be imported
    or does not do what `engine/programs/processors.py` says.
    """
    return {name: _checked(name, _loaded(name), vocab) for name in names}


def _loaded(name: str) -> object:
    named = {entry.value: entry for entry in entry_points(group=GROUP) if entry.name == name}
    if not named:
        known = ", ".join(sorted({entry.name for entry in entry_points(group=GROUP)})) or "none"
        raise InvalidValue(
            f"{SETTING}={name!r}: no installed package declares this entry point in the group {GROUP} "
            f"(declared: {known}); install the package into this environment",
            SETTING,
        )
    if len(named) > 1:
        raise InvalidValue(
            f"{SETTING}={name!r}: several packages declare it ({', '.join(sorted(named))}); uninstall all but one",
            SETTING,
        )
    (point,) = named.values()
    try:
        return point.load()
    except Exception as error:  # of the package's own code
        what = f"{SETTING}={name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}"
        raise InvalidValue(what, SETTING) from error


def _checked(name: str, loaded: object, vocab: int) -> Processor:
    """Return a processor after trying it on two rows, or raise InvalidValue."""
    if not callable(loaded):
        raise InvalidValue(f"{SETTING}={name!r} is {type(loaded).__name__}, not a function", SETTING)
    rows = np.random.default_rng(0).standard_normal((3, vocab), np.float32)
    arguments = np.full(2, PLAIN_ARGUMENT, np.float32)
    wants = "it must be a JAX function of logits [rows, vocab] float32 and arguments [rows] float32"
    try:
        program = jax.jit(loaded)
        result = jax.eval_shape(program, rows[:2], arguments)
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
        if (shape, dtype) == (rows[:2].shape, jnp.float32):
            first, again = (np.asarray(program(rows[[0, other]], arguments))[0] for other in (1, 2))
    except Exception as error:  # of the package's own code
        raise InvalidValue(f"{SETTING}={name!r} raised {type(error).__name__}: {error}; {wants}", SETTING) from error
    if (shape, dtype) != (rows[:2].shape, jnp.float32):
        gave = type(result).__name__ if shape is None else f"{dtype}{list(shape)}"
        raise InvalidValue(
            f"{SETTING}={name!r} returns {gave} for logits float32{list(rows[:2].shape)}: it must return "
            "logits of the same shape and type",
            SETTING,
        )
    if not np.array_equal(first, again, equal_nan=True):
        raise InvalidValue(
            f"{SETTING}={name!r} mixes rows: each row of its result must depend on that row alone, or tokens would "
            "depend on the requests that share a step",
            SETTING,
        )
    return loaded
