"""Acceptance against exact values: Markov chains, and a draft model equal to its target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.distillation import prompts, teacher
from jaxserve.distillation.acceptance import RollOut, measure
from jaxserve.distillation.samples import Sample
from jaxserve.errors import InvalidValue
from jaxserve.tokenizer import Tokenizer

VOCAB, DRAFTED = 5, 4


class Chain:
    """A model with the next token depending only on the last one, as target and draft."""

    def __init__(self, table: jax.Array) -> None:  # [V, V] logits
        self.table = table

    def hidden(self, *given: jax.Array) -> jax.Array:
        return jax.nn.one_hot(given[-1], VOCAB)

    def logits(self, *given: jax.Array) -> jax.Array:
        return given[-1] @ self.table


def test_acceptance_of_markov_chains_is_the_power_of_their_overlap() -> None:
    rng = np.random.default_rng(0)
    tables = [jnp.asarray(rng.normal(size=(VOCAB, VOCAB)) * 1.5, jnp.float32) for _ in range(2)]
    target, draft = map(Chain, tables)
    last = rng.integers(VOCAB, size=400)
    found = [Sample(15, 1.0, np.asarray([x, 0], np.int32), 1) for x in last]  # drafts are possible only after x
    made = measure(target, None, Chain, draft.table, found, drafted=DRAFTED)  # type: ignore[arg-type]
    p, q = (np.asarray(jax.nn.softmax(table)) for table in tables)
    overlap, best = np.minimum(p, q), p.argmax(1) == q.argmax(1)
    assert made.overlap == pytest.approx(overlap.sum(1)[last].mean(), abs=1e-5)
    assert made.agreement == pytest.approx(best[last].mean(), abs=1e-5)
    for j, survival in enumerate(made.sampled.survival, start=1):
        exact = np.linalg.matrix_power(overlap, j).sum(1)[last].mean()
        assert survival == pytest.approx(exact, abs=0.02), j
    state, alive = last, np.ones(len(last))
    for survival in made.greedy.survival:
        alive, state = alive * best[state], q.argmax(1)[state]
        assert survival == pytest.approx(alive.mean(), abs=1e-5)


def test_a_draft_model_equal_to_its_target_is_always_accepted(target: Path) -> None:
    """So the model for training and the one for serving compute the same."""
    safetensors = pytest.importorskip("safetensors.numpy")
    from jaxserve.training.loop import flat_params, rebuilder
    from jaxserve.training.net import Net, NetConfig

    config = NetConfig(vocab=300, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, ff_dim=64, max_positions=64)
    net = Net(config, nnx.Rngs(0))
    stored = safetensors.load_file(target / "model.safetensors")
    params = {}
    for name, value in flat_params(net)[1].items():
        owner, _, leaf = name.rpartition(".")
        read = np.asarray(stored[f"model.{owner}.weight"], np.float32)
        params[name] = jnp.asarray(read.T if leaf == "kernel" else read)
        assert params[name].shape == value.shape
    given = teacher.on(target, jax.devices()[:1])
    rng = np.random.default_rng(0)
    found = [Sample(15, t, rng.integers(300, size=n).astype(np.int32), 3) for t in (0.0, 1.0) for n in (5, 12, 30)]
    made = measure(given, given.load(target, "float32"), rebuilder(net), params, found, drafted=3)
    assert made.positions == 2 * (2 + 9 + 27)
    assert made.overlap == pytest.approx(1.0, abs=1e-4) and made.agreement == 1.0
    assert made.sampled.survival == pytest.approx((1.0,) * 3, abs=1e-3)
    assert made.greedy.survival == (1.0,) * 3


def test_hand_computed_tokens_per_step() -> None:
    made = RollOut(1, (0.5, 0.25, 0.0, 0.0))
    assert made.acceptance == (0.5, 0.5, 0.0, 0.0)
    assert [made.tokens_per_step(k) for k in (1, 2, 4)] == [1.5, 1.75, 1.75]


def test_a_model_generates_its_own_prompts() -> None:
    class Echo:
        """An LLM double that generates as many tokens as allowed."""

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
            assert prompts == [[7]] * 5 and all(p.temperature == 1.0 and p.ignore_eos for p in params)
            said = [SimpleNamespace(token_ids=[p.seed] * p.max_tokens) for p in params]
            return [SimpleNamespace(outputs=[one]) for one in said]

    found = prompts.of_model(7, 10, 3)(Echo(), 16, 21)  # type: ignore[arg-type]
    assert [n for n, _ in found] == [16, 17, 18, 19, 20]
    assert all(prompt[0] == 7 and set(prompt[1:]) == {3 + n} and len(prompt) <= 10 for n, prompt in found)


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("a.jsonl", "{", "a.jsonl:17 is not JSON"),
        ("a.jsonl", '{"text": "x"}', 'a.jsonl:17 must be a string, {"prompt": text} or {"messages": [...]}'),
        ("a.txt", None, "has 16 prompts; a draft needs at least 17"),
    ],
)
def test_prompts_are_read_from_a_file(
    name: str, line: str | None, said: str, tmp_path: Path, target: Path, monkeypatch: Any
) -> None:
    tokenizer, file = Tokenizer.load(target), tmp_path / name
    rows = ['"return self"', '{"prompt": "value"}', '{"messages": [{"role": "user", "content": "Hi"}]}', '"x"'] * 4
    file.write_text("\n".join(rows))
    found = prompts.of_file(file, tokenizer, 9)(None, 14, 18)  # type: ignore[arg-type]
    assert [n for n, _ in found] == [14, 15, 0, 1]
    assert all(0 < len(prompt) <= 9 for _, prompt in found)
    if line is None:
        monkeypatch.setattr(prompts, "FEWEST", 17)
    else:
        file.write_text("\n".join([*rows, line]))
    with pytest.raises(InvalidValue) as refused:
        prompts.of_file(file, tokenizer, 9)
    assert said in str(refused.value)
