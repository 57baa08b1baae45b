"""Servers whose model writes what a test says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.server.live import Live
from tests.support.server.templates import tokenizer_of

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant: {% if thinking %}<think>{% else %}{% if false %}</think>{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def writer(fakes: Callable[..., Live]) -> Callable[[str, str], Live]:
    """A function that makes the engine of the server with a template write a text."""
    made: dict[str, Live] = {}

    def write(template: str, text: str) -> Live:
        if template not in made:
            eos = frozenset({0})  # which compilers of grammars need
            made[template] = fakes(own=tokenizer_of(template), max_model_len=2000, eos=eos)
            made[template].engine.unlucky = None
        live = made[template]
        live.engine.writes = live.service.tokenizer.encode(text, add_special_tokens=False)
        return live

    return write


@pytest.fixture
def say(writer: Callable[[str, str], Live]) -> Callable[[str], Live]:
    """Make the engine write a text, with a template that knows thinking."""
    return partial(writer, TEMPLATE)
