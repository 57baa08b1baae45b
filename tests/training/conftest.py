"""A target small enough to be learned in seconds: random weights, and a tokenizer of 300 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = "def return self class import value for in if not None True name print path open read write line text "


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers that mostly repeats its last token: learned quickly, but never by chance."""
    import jax
    from flax import nnx

    from jaxserve.demo import corpus, vocab
    from jaxserve.demo.export import write_model
    from jaxserve.training.loop import flat_params
    from jaxserve.training.net import Net, NetConfig

    config = NetConfig(vocab=300, dim=32, layers=2, heads=2, kv_heads=1, head_dim=16, ff_dim=64, max_positions=64)
    net = Net(config, nnx.Rngs(1))
    _, params = flat_params(net)
    grown = {
        name: value * ((25.0 if "embed" in name else 8.0) if value.ndim > 1 else 1.0) for name, value in params.items()
    }
    folder = tmp_path_factory.mktemp("target")
    tokenizer = vocab.train_tokenizer([WORDS * 3, *(text for pair in corpus.ABOUT for text in pair)], config.vocab)
    write_model(folder, config, tokenizer, jax.device_get(grown))
    return folder
