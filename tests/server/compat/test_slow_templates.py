"""Chat templates that loop for ever, by themselves or by what a request holds: refused by name, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import InvalidValue
from jaxserve.tokenizer import Tokenizer
from jaxserve.tools import budget
from jaxserve.tools.budget import Budget, OverBudget, metered, within
from tests.support.server.templates import ALTERNATES, COUNTS, FIRST, HEADERS, SHORT_IDS, tokenizer_of

HI: list[Any] = [{"role": "user", "content": "x" * 1000}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
SLOW = {
    "nested loops": (LOOP, "steps"),
    "a condition": ("{% for i in range(99999) %}{% for j in range(99999) if i %}{% endfor %}{% endfor %}", "steps"),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}", "steps"),
    "a macro that calls itself": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion depth"),
    "a caller": (
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for i in range(99999) %}"
        "{% call f() %}{% for j in range(99999) %}{% endfor %}{% endcall %}{% endfor %}", "steps"),
    "a recursive loop": (
        "{% for n in [[], []] recursive %}{{ loop([[], []]) }}{% endfor %}",
        "steps|recursion depth"),
    "one range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "long texts": (
        "{% for m in messages %}{% for j in range(100000) %}{{ m.content }}{% endfor %}{% endfor %}", "characters"),
    "messages by messages": (
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ c.role }}{% endfor %}{% endfor %}"
        "{% endfor %}", "steps"),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of which the law is the same, so that a test takes no seconds."""
    monkeypatch.setattr(Budget.__new__, "__defaults__", (5_000, 1 << 20, 1e9))


@pytest.mark.parametrize("name", SLOW)
def test_a_template_without_end_is_refused_with_what_it_does(small: None, name: str) -> None:
    template, says = SLOW[name]
    messages = [*HI, {"role": "assistant", "content": "y"}] * 20 if name == "messages by messages" else HI
    with pytest.raises(InvalidValue, match=says) as caught:
        tokenizer_of(template).chat(messages)
    assert caught.value.param == "messages"


def test_a_template_of_pairs_is_ended_too(small: None) -> None:
    with pytest.raises(InvalidValue, match="steps"):
        Tokenizer(tokenizer_of(HEADERS).hf, LOOP).pair("x", "y")


def test_filters_between_steps_are_bounded_by_cpu_time() -> None:
    template = "{% for i in range(100000) %}{{ range(1000) | sum }}{% endfor %}"
    metered(template)
    render = tokenizer_of(HEADERS).hf.apply_chat_template
    with pytest.raises(OverBudget, match="0 s of CPU time"):
        within(Budget(seconds=0), lambda: render(HI, chat_template=template, tokenize=False))


@pytest.mark.parametrize("template", [ALTERNATES, COUNTS, FIRST, HEADERS, SHORT_IDS])
def test_the_count_changes_no_prompt(template: str) -> None:
    talk = [*HI, {"role": "assistant", "content": "Ho"}, *HI]
    hf = tokenizer_of(template).hf
    plain = hf.apply_chat_template(talk, chat_template=template + "{# not counted #}", tokenize=False)
    assert tokenizer_of(template).chat(talk) == plain


def test_a_server_goes_on(small: None, fake: Any) -> None:
    """Templates without end hold no text thread: as many requests as there are threads, and one more."""
    live = fake(own=tokenizer_of(LOOP))
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}), ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 1}), ("/tokenize", {"messages": HI}),
    ) * 3:  # fmt: skip
        answer = live.http.post(path, json=body)
        assert answer.status_code == 400 and "steps" in answer.text, answer.text
    assert live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_what_is_not_rendered_within_a_budget_is_not_counted() -> None:
    template = "{% for i in range(100) %}{{ i }}{% endfor %}"
    metered(template)
    assert budget._METER.get() is None
    text = tokenizer_of(HEADERS).hf.apply_chat_template(HI, chat_template=template, tokenize=False)
    assert text == "".join(map(str, range(100)))
