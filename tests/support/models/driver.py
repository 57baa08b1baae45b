"""Small random models made by transformers, and a hand-driven paged cache to compare with them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
import transformers
from jax.sharding import Mesh, NamedSharding

from jaxserve.models import registry
from jaxserve.models.spec import ModelSpec
from jaxserve.models.weights import load_weights
from pallas_kernels.attention.api import attention
from pallas_kernels.layout import Ragged

Ints = npt.NDArray[np.int32]
PAGE, PAGES, SLOTS = 4, 24, 5
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def peer(family: str, **changes: Any) -> torch.nn.Module:
    """Return a transformers `<family>ForCausalLM` with random weights large enough to matter."""
    torch.manual_seed(0)
    kind = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    config = getattr(transformers, kind)(**deepcopy({**SMALL, **changes}), attn_implementation="eager")
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    fill(model)
    return model


def fill(model: torch.nn.Module) -> None:
    """Give a model random weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=1.0 if weight.ndim == 1 else 0.0, std=0.2)
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # a state that lasts for tens of tokens
                weight.normal_(mean=-3.0, std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)


def expected(model: torch.nn.Module, tokens: Ints) -> npt.NDArray[np.float32]:
    """Return the logits [T, V] of one sequence without a cache."""
    with torch.no_grad():
        found: npt.NDArray[np.float32] = model(torch.tensor(tokens.astype(np.int64))[None]).logits[0].numpy()
    return found


def mesh(tp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:tp]), ("tp",))


class Driver:
    """One sequence on shuffled pages, fed chunk by chunk."""

    def __init__(self, spec: ModelSpec, weights: Any, where: Mesh) -> None:
        self.spec, self.weights, self.mesh, self.done = spec, weights, where, 0
        cache, sharding = spec.cache, NamedSharding(where, spec.cache.partition)
        dtype = weights["embed"].dtype
        made = [jnp.zeros(cache.shape(PAGES, PAGE), dtype)] * 2
        if cache.state is not None:  # what a slot held before must not matter
            made[1:] = [jnp.full(shape, jnp.nan) for shape in cache.state.shapes(SLOTS, cache.heads_first)]
        kv, *states = made
        self.pools = jax.tree.map(lambda one: jax.device_put(jnp.copy(one), sharding), cache.pools(kv, states))
        self.table = np.random.default_rng(1).permutation(PAGES).astype(np.int32)[None, :12]
        self.programs = {d: jax.jit(partial(self._program, d), donate_argnums=1) for d in (True, False)}

    @classmethod
    def of(cls, path: Path, tp: int = 1) -> Driver:
        # Unsharded weights are laid out as on a CPU engine, shards as on an accelerator.
        spec, where = replace(registry.load_spec(path).for_tp(tp), transposed=tp == 1), mesh(tp)
        return cls(spec, load_weights(path, spec, "float32", [where])[0], where)

    def _program(self, decode: bool, weights: Any, pools: Any, tokens: jax.Array, ragged: Ragged) -> Any:
        kernel = attention(self.mesh, decode=decode)
        hidden, pools = registry.forward(self.spec, weights, pools, tokens, ragged, attention=kernel)
        return registry.logits(self.spec, weights, hidden), pools

    def feed(self, tokens: Ints, padded: int | None = None) -> npt.NDArray[np.float32]:
        """Feed the next tokens of the sequence in a step padded to `padded` tokens; returns their logits [T, V]."""
        program, args = self._call(tokens, padded or len(tokens))
        self.done += len(tokens)
        with jax.default_matmul_precision("highest"):
            out, self.pools = program(self.weights, self.pools, *args)
        return np.asarray(out)[: len(tokens)]

    def compiled(self, tokens: Ints) -> str:
        """Return the optimized program of `feed(tokens)`."""
        program, args = self._call(tokens, len(tokens))
        return str(program.lower(self.weights, self.pools, *args).compile().as_text())

    def _call(self, tokens: Ints, total: int) -> tuple[Any, tuple[Ints, Ragged]]:
        count, rest = len(tokens), (0, total - len(tokens))
        here = np.arange(self.done, self.done + count, dtype=np.int32)
        ragged = Ragged(
            positions=np.pad(here, rest),
            rows=np.pad(np.zeros(count, np.int32), rest, constant_values=1),
            write=np.pad(self.table[0, here // PAGE] * PAGE + here % PAGE, rest, constant_values=PAGES * PAGE),
            starts=np.zeros(1, np.int32),
            lengths=np.full(1, count, np.int32),
            contexts=np.full(1, self.done + count, np.int32),
            block_tables=self.table,
            slots=None if self.spec.delta is None else np.full(1, SLOTS - 2, np.int32),
        )
        return self.programs[total == 1], (np.pad(tokens, rest), ragged)
