"""A server whose model writes what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import jaxserve.demo
from jaxserve.config import ServeConfig
from jaxserve.server.service import Service
from jaxserve.tokenizer import Tokenizer
from tests.support.server.double import Double
from tests.support.server.live import Live

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant: {% if thinking %}<think>{% else %}{% if false %}</think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def thinking() -> Iterator[Live]:
    """A server whose engine writes what `writes` says, with a template that knows thinking."""
    tokenizer = Tokenizer.load(jaxserve.demo.model_path(), chat_template=TEMPLATE)
    engine = Double(max_model_len=2000)
    engine.info = replace(engine.info, eos=frozenset({0}))  # which compilers of grammars need
    server = Live(Service(engine, tokenizer, ServeConfig.load(disable_log_stats=True)))
    yield server
    server.stop()


@pytest.fixture
def say(thinking: Live) -> Callable[[str], Live]:
    """Make the engine write a text."""

    def say(text: str) -> Live:
        thinking.engine.writes = thinking.service.tokenizer.encode(text, add_special_tokens=False)
        return thinking

    return say
