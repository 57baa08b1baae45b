"""The training objective of a draft: the target's distribution of the next token.

With target p and draft q a drafted token is accepted with probability sum(min(p, q)) = 1 - TV(p, q)
(Leviathan et al., arXiv 2211.17192, theorem 3.5). TV is therefore the quantity to minimize, but its
gradient vanishes for tokens that are likely under p and have no probability under q. KL(p | q) bounds TV
by Pinsker's inequality and has a gradient wherever q is wrong. Training begins with KL and ends with TV
(cf. DistillSpec, Zhou et al., arXiv 2310.08461, which compares divergences).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.distillation.teacher import Teacher
from jaxserve.training.loop import Loss
from jaxserve.training.net import Net

HELD = 128 << 20  # bytes; if a step's logits are larger, the gradient recomputes them


class Inputs(NamedTuple):
    """The inputs of a training step."""

    weights: Any  # of the target
    tokens: jax.Array  # [S, T] int32
    wanted: jax.Array  # [S, T, E], the target's hidden states of the tokens
    mix: jax.Array  # [] float32, share of TV in the loss


def divergence(teacher: Teacher) -> Loss:
    """Return the loss: the mean over all positions of (1 - mix) KL(p | q) + mix TV(p, q), in nats."""

    def loss(net: Net, given: Inputs) -> jax.Array:
        hidden = net.hidden(given.tokens)

        def of_row(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            log_p = jax.nn.log_softmax(teacher.logits(given.weights, row[0]))  # [T, V]
            log_q = jax.nn.log_softmax(net.logits(row[1]))
            p = jnp.exp(log_p)
            kl = jnp.sum(p * (log_p - log_q), axis=-1)
            tv = 0.5 * jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1)
            return total + jnp.mean((1 - given.mix) * kl + given.mix * tv), None

        # Row by row. Logits of a large vocabulary are recomputed for the gradient, to save memory.
        once = given.tokens.size * teacher.spec.vocab * 4 <= HELD
        total, _ = jax.lax.scan(of_row if once else jax.checkpoint(of_row), jnp.float32(0), (given.wanted, hidden))
        mean: jax.Array = total / given.tokens.shape[0]
        return mean

    return loss
