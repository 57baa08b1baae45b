"""Logits processors: functions of other packages that change the logits of the rows that ask for them.

A processor maps logits [G, V] float32 and arguments [G] float32 to logits [G, V] float32; each row depends
on that row alone. `engine/startup/processors.py` finds and checks them. They are traced into the programs
that sample, so a token still depends on its request and its position only.

A row that processors leave without a finite logit gets EMPTY in place of a token: its request ends, but the
KV of the model is right, unlike that of a row with BAD.

Letters: G sampling rows, V vocabulary, C processors of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.engine.programs.sampling import BAD, finite
from jaxserve.engine.programs.speculate import NONE
from jaxserve.sched.api.params import PLAIN_ARGUMENT

Processor = Callable[[jax.Array, jax.Array], jax.Array]  # logits [G, V], arguments [G] -> logits [G, V]


EMPTY = -3  # in place of a token if processors leave none; BAD is -1, and `speculate.NONE` -2


def processed(logits: jax.Array, arguments: jax.Array, processors: Sequence[Processor]) -> jax.Array:
    """Apply the processors in order, each to the rows of logits [G, V] that have arguments [G, C] for it.

    Rows that are not finite stay so, whatever a processor would make of them.
    """
    for index, processor in enumerate(processors):
        logits = _applied(processor, logits, arguments[:, index])
    return logits


def told_apart(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Replace BAD in tokens [G] by EMPTY where the model's logits [G, V] are finite."""

    def told(tokens: jax.Array, logits: jax.Array) -> jax.Array:
        return jnp.where((tokens == BAD) & finite(logits), EMPTY, tokens)

    apart: jax.Array = lax.cond(jnp.any(tokens == BAD), told, lambda tokens, _: tokens, tokens, logits)
    return apart


def several_told_apart(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Do the same for verified tokens [G, D] and logits [G * D, V].

    A row keeps the tokens before EMPTY and gains no other, so that its output does not depend on drafts.
    """
    told = told_apart(tokens.reshape(-1), logits).reshape(tokens.shape)
    return told.at[:, 1:].set(jnp.where(told[:, 1:] == EMPTY, NONE, told[:, 1:]))


def _applied(processor: Processor, logits: jax.Array, argument: jax.Array) -> jax.Array:
    """Apply a processor to the rows that ask for it, and run it only if there are any."""
    asked = ~jnp.isnan(argument)  # see `inputs.NOT_ASKED`

    def changed(x: jax.Array) -> jax.Array:
        changed_logits = processor(x, jnp.where(asked, argument, PLAIN_ARGUMENT))
        return jnp.where((asked & finite(x))[:, None], changed_logits, x)

    applied: jax.Array = lax.cond(jnp.any(asked), changed, lambda x: x, logits)
    return applied
