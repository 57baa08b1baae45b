"""The target's next-token distribution over whole rows, computed by the forward pass of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.engine.startup.build import from_folder
from jaxserve.errors import InvalidValue
from jaxserve.models import registry
from jaxserve.models.layers import Tree
from jaxserve.models.spec import ModelSpec
from pallas_kernels.attention.api import attention
from pallas_kernels.layout import Ragged

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[Any]

KEPT = 2 << 30  # bytes of hidden states that the host caches at most
PAGE = 128  # tokens; large pages are possible, because rows are contiguous


@dataclass(frozen=True)
class Teacher:
    """A target model on its mesh. Letters: S rows, T tokens in a row, E model dim, V vocabulary."""

    spec: ModelSpec  # from `for_tp`
    mesh: Mesh

    def load(self, path: Path, dtype: Any) -> Tree:
        """Load the weights of the model in folder `path` onto the mesh."""
        return from_folder(path)(self.spec, dtype, [self.mesh])[0]

    def replicated(self, tree: Any) -> Any:
        """Replicate arrays on every device of the mesh."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def hidden(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """Compute hidden states [S, T, E] after the final norm; each row of tokens [S, T] int32 is a prompt."""
        rows, length = tokens.shape
        pages = -(-length // PAGE)
        row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), length)
        position = jnp.tile(jnp.arange(length, dtype=jnp.int32), rows)
        lengths = jnp.full(rows, length, jnp.int32)
        ragged = Ragged(
            positions=position,
            rows=row,
            write=row * pages * PAGE + position,
            starts=jnp.arange(rows, dtype=jnp.int32) * length,
            lengths=lengths,
            contexts=lengths,
            block_tables=jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        )
        cache, kind = self.spec.cache, weights["embed"].dtype
        pools = cache.pools(jnp.zeros(cache.shape(rows * pages, PAGE), kind))
        out, _ = registry.forward(self.spec, weights, pools, tokens.reshape(-1), ragged, attention=attention(self.mesh))
        return out.reshape(rows, length, -1)

    def table(self, weights: Tree) -> jax.Array:
        """Return the table [V, E] of the output head."""
        table: jax.Array = weights["embed" if self.spec.tied else "head"][: self.spec.vocab]
        return table

    def logits(self, weights: Tree, hidden: jax.Array) -> jax.Array:
        """Compute logits [T, V] float32 from hidden [T, E]."""
        return registry.logits(self.spec, weights, hidden)


class Memory:
    """Rows of one length cut from a text, and the target's hidden states, which are cached if they fit.

    States are computed for groups of adjacent rows, so that they depend neither on the order of use nor
    on interruptions of the run.
    """

    def __init__(
        self, hidden: Callable[[jax.Array], jax.Array], tokens: Ints, rows: int, length: int, dim: int
    ) -> None:
        """Cut `tokens` into rows. Raises InvalidValue if there are too few for one step.

        hidden: maps tokens [S, T] to states [S, T, E]. rows: rows of a step, and of a group.
        """
        count = len(tokens) // length
        if count < rows:
            raise InvalidValue(
                f"{len(tokens)} tokens are too few for {rows} rows of {length}: give more --samples, fewer --rows or a "
                "smaller --long-length"
            )
        self.text = np.asarray(tokens[: count * length]).reshape(count, length)  # [rows, T]
        self._hidden = hidden
        self._rows = rows
        self._keeps = count * length * dim * 4 <= KEPT
        self._groups: dict[int, Floats] = {}

    def step(self, step: int, seed: int) -> tuple[Ints, Any]:
        """Return the rows of a step [S, T] and their states [S, T, E]. Each epoch shuffles the rows anew."""
        epoch, position = divmod(step, len(self.text) // self._rows)
        chosen = np.random.default_rng((seed, epoch)).permutation(len(self.text))[position * self._rows :][: self._rows]
        tokens = self.text[chosen]
        if not self._keeps:
            return tokens, self._hidden(jnp.asarray(tokens))
        return tokens, np.stack([self._state(int(row)) for row in chosen])

    def _state(self, row: int) -> Floats:
        """Return the states [T, E] of one row."""
        group = min(row // self._rows * self._rows, len(self.text) - self._rows)
        if group not in self._groups:
            self._groups[group] = np.asarray(self._hidden(jnp.asarray(self.text[group : group + self._rows])))
        state: Floats = self._groups[group][row - group]
        return state


def on(path: Path, devices: Sequence[Any]) -> Teacher:
    """Return the model of a folder, tensor parallel over `devices`. Raises InvalidValue if it cannot be split."""
    return Teacher(registry.load_spec(path).for_tp(len(devices)), Mesh(np.array(devices), ("tp",)))
