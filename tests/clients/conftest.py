"""A real server for real clients: `pytest -n 0 -m clients -W default tests/clients`, with the extra `clients`.

Some clients leave connections and event loops open, which pytest sees at its very end: hence `-W default`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.server.live import Live

NEEDS = {  # the package that a file's tests need; OpenAI's client is in the extra `test`
    "test_instructor": "instructor",
    "test_langchain": "langchain_openai",
    "test_litellm": "litellm",
    "test_llamaindex": "llama_index",
    "test_lm_eval": "lm_eval",
}
SERVED: dict[str, Any] = {
    "mesh": "1x1",
    "max_model_len": 1024,  # tools are shown to the demo model as text, in tokens of two characters or so
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory": "32MiB",
    "disable_log_stats": True,
}
FOLDER = Path(__file__).parent
QUIET = {  # clients that would report their use
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
}


def wanted(config: pytest.Config) -> bool:
    """Return whether this run has the tests of this folder."""
    marks = str(config.getoption("markexpr", default=""))
    return "clients" in marks and "not clients" not in marks


def pytest_configure(config: pytest.Config) -> None:
    """Set what the clients read when they are imported."""
    if wanted(config):
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave these files out of other runs: importing the clients takes seconds in each worker."""
    return None if wanted(config) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the clients' own warnings are not ours."""
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.filterwarnings("default"))
            needed = NEEDS.get(item.path.stem)
            if needed and importlib.util.find_spec(needed) is None:
                item.add_marker(pytest.mark.skip(f"{needed} is not installed: pip install '.[clients]'"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(jaxserve.demo.model_path())


@pytest.fixture(scope="session")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """The server of all these tests: the demo model on one instance."""
    from jaxserve.engine.engine import Engine

    config = ServeConfig.load(**SERVED)
    engine = Engine.start(config)
    made = Live(Service(engine, tokenizer, config))
    yield made
    made.stop()
    engine.close()


@pytest.fixture(autouse=True)
def _no_request_is_left(live: Live) -> Iterator[None]:
    """Whatever a client does, its requests end."""
    yield
    live.quiet()


@pytest.fixture(scope="session")
def base(live: Live) -> str:
    """The `base_url` that users give to their client."""
    return f"{live.url}/v1"
