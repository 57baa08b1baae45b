"""The target's next-token distribution over whole rows, by the forward pass that serves."""

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

KEPT = 2 << 30  # bytes of hidden states on the host
PAGE = 128  # tokens; rows are contiguous, so that a page may be large


@dataclass(frozen=True)
class Teacher:
    """A target on its mesh. Letters: S rows, T tokens in a row, E model dim, V vocabulary."""

    spec: ModelSpec  # of `for_tp`
    mesh: Mesh

    def load(self, path: Path, dtype: Any) -> Tree:
        """The weights of the model in folder `path`, on the mesh."""
        return from_folder(path)(self.spec, dtype, [self.mesh])[0]

    def replicated(self, tree: Any) -> Any:
        """Arrays whole on every device of the mesh."""
        return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))

    def hidden(self, weights: Tree, tokens: jax.Array) -> jax.Array:
        """tokens [S, T] int32 -> [S, T, E] after the final norm: every row is a prompt of its own, from position 0."""
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
        """What turns hidden states into logits, [V, E]."""
        found: jax.Array = weights["embed" if self.spec.tied else "head"][: self.spec.vocab]
        return found

    def logits(self, weights: Tree, hidden: jax.Array) -> jax.Array:
        """hidden [T, E] -> [T, V] float32."""
        return registry.logits(self.spec, weights, hidden)


class Memory:
    """Rows of one length cut from a text, and the target's hidden states of them, which are computed once if they fit.

    States are computed for groups of neighbouring rows, so that they do not depend on the order of use, nor on where a
    run was broken off.
    """

    def __init__(
        self, hidden: Callable[[jax.Array], jax.Array], tokens: Ints, rows: int, length: int, dim: int
    ) -> None:
        """`rows`: of a step, hence of a group. `hidden`: [S, T] -> [S, T, E]. Raises InvalidValue: too little text."""
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
        """The rows of a step [S, T] and their states [S, T, E]; every epoch has each row once, in another order."""
        epoch, position = divmod(step, len(self.text) // self._rows)
        chosen = np.random.default_rng((seed, epoch)).permutation(len(self.text))[position * self._rows :][: self._rows]
        tokens = self.text[chosen]
        if not self._keeps:
            return tokens, self._hidden(jnp.asarray(tokens))
        return tokens, np.stack([self._state(int(row)) for row in chosen])

    def _state(self, row: int) -> Floats:
        """[T, E] of one row."""
        group = min(row // self._rows * self._rows, len(self.text) - self._rows)
        if group not in self._groups:
            self._groups[group] = np.asarray(self._hidden(jnp.asarray(self.text[group : group + self._rows])))
        found: Floats = self._groups[group][row - group]
        return found


def on(path: Path, devices: Sequence[Any]) -> Teacher:
    """The model of a folder on some devices, tensor parallel. Raises InvalidValue where it cannot be split so."""
    return Teacher(registry.load_spec(path).for_tp(len(devices)), Mesh(np.array(devices), ("tp",)))
