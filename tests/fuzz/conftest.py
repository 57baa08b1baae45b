"""The application with a real engine on the demo model, in this process and without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(autouse=True, scope="module")
def _little_memory() -> None:
    """Keep compiled programs between files, since the engine stays alive and counts compilations."""


@pytest.fixture(autouse=True, scope="module")
def _few_mappings(compiled_is_let_go: Callable[[int], None]) -> None:
    """Forget compiled programs before the engine only, which stays alive."""
    compiled_is_let_go(10_000)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service with a small context and a short queue, so that valid requests end soon."""
    from jaxserve.engine.engine import Engine

    config = ServeConfig.load(
        max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory="32MiB", max_num_queued_reqs=64,
        disable_log_stats=True, max_body_size="256k", admin_key=("boss",), mesh="1x1",
    )  # fmt: skip
    engine = Engine.start(config)
    made = Service(engine, Tokenizer.load(jaxserve.demo.model_path()), config)
    yield made
    made.close()
    engine.close()
