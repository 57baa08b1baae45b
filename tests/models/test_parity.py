"""Logits match transformers in one step, in chunks, token by token, and on any number of shards."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.support.examples import cases
from tests.support.models.configs import CASES, DEEPSEEK, FULL, GROUPS, TOKENS
from tests.support.models.driver import Driver, expected, peer
from tests.support.models.parity import in_steps

BARE = [(name, (tp,)) for name, tp in zip(CASES, itertools.cycle((2, 1, 4)))]
EVERY = [(name, (1, 2, 4)) for name in (*CASES, *FULL)]


@pytest.mark.parametrize(("name", "tps"), cases(BARE, EVERY, apart=True))
def test_logits_match_transformers(tmp_path: Path, name: str, tps: tuple[int, ...]) -> None:
    family, changes = (CASES | FULL)[name]
    model = peer(family, **changes)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    want = expected(model, TOKENS)
    for tp in tps:
        got, again = in_steps(tmp_path, tp)  # two chunks, and 32 tokens one by one
        np.testing.assert_allclose(got, want, atol=2e-4, rtol=0, err_msg=f"{tp=}")
        np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
        np.testing.assert_allclose(again, want[:16], atol=2e-4, rtol=0, err_msg=f"{tp=}")


@pytest.mark.parametrize(("family", "reductions"), [("Qwen3", 2 * 2 + 1), ("DeepseekV2", 2 * 3 + 1)])
def test_shards_communicate_by_reductions_only(tmp_path: Path, family: str, reductions: int) -> None:
    """There are two reductions per layer and one for the embedding; no weight or page is gathered."""
    changes = {"Qwen3": {"head_dim": 16}, "DeepseekV2": {**DEEPSEEK, **GROUPS}}[family]
    peer(family, **changes).save_pretrained(tmp_path)  # type: ignore[operator]
    driver = Driver.of(tmp_path, tp=4)  # four shards with two KV heads
    assert driver.pools[0][0].shape[2] == 4
    text = driver.compiled(TOKENS[:1])
    moved = {name: text.count(f" {name}(") for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")}
    assert moved == {"all-gather": 0, "all-to-all": 0, "collective-permute": 0, "all-reduce": reductions}
