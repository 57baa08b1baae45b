"""Conversations as clients send them, rendered by templates that refuse or drop some of their messages."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import jaxserve.demo
from jaxserve.tokenizer import Tokenizer
from tests.support.server.templates import (
    ALTERNATES,
    COUNTS,
    DROPS,
    FIRST,
    HARMONY,
    HEADERS,
    NO_SYSTEM,
    ONE_CALL,
    SHORT_IDS,
    tokenizer_of,
)


def render(template: str, *messages: tuple[str, Any], **given: Any) -> str:
    made = [{"role": role, **(said if isinstance(said, dict) else {"content": said})} for role, said in messages]
    return tokenizer_of(template).chat(made, **given).replace("None", "").strip()


DEVELOPER = (("developer", "In French."), ("user", "Hi"))
TWO = (("system", "A"), ("developer", "B"), ("user", "Hi"))
LATE = (("system", "A"), ("user", "Hi"), ("system", "B"), ("user", "So?"))
LAST = (("user", "Hi"), ("system", "B"))


@pytest.mark.parametrize(
    ("template", "talk", "prompt"),
    [
        (HEADERS, DEVELOPER, "<system>In French.<user>Hi"),
        (DROPS, DEVELOPER, "<system>In French.<user>Hi"),
        (FIRST, DEVELOPER, "<system>In French.<user>Hi"),
        (HARMONY, DEVELOPER, "<developer>In French.<user>Hi"),
        (ALTERNATES, DEVELOPER, "<user>In French.Hi"),
        (NO_SYSTEM, DEVELOPER, "<user>In French.\n\nHi"),
        (HEADERS, TWO, "<system>A<system>B<user>Hi"),
        (FIRST, TWO, "<system>A\n\nB<user>Hi"),
        (HARMONY, TWO, "<developer>A\n\nB<user>Hi"),
        (ALTERNATES, TWO, "<user>A\n\nBHi"),
        (NO_SYSTEM, TWO, "<user>A\n\nB\n\nHi"),
        (DROPS, LATE, "<system>A<user>Hi<system>B<user>So?"),
        (FIRST, LATE, "<system>A<user>Hi<user>B<user>So?"),
        (HARMONY, LATE, "<developer>A<user>Hi<user>B<user>So?"),
        (ALTERNATES, LATE, "<user>AHi\n\nB\n\nSo?"),
        (DROPS, LAST, "<default><user>Hi<system>B"),
        (FIRST, LAST, "<user>Hi<user>B"),
        (ALTERNATES, LAST, "<user>Hi\n\nB"),
        (ALTERNATES, (("user", "Hi"), ("assistant", "Yes"), ("assistant", "No")), "<user>Hi<assistant>Yes\n\nNo"),
        (FIRST, (("user", "Hi"), ("user", "Ho")), "<user>Hi<user>Ho"),
    ],
)
def test_no_instruction_is_refused_or_lost(template: str, talk: Any, prompt: str) -> None:
    assert render(template, *talk) == prompt


@hypothesis.given(
    st.sampled_from([HEADERS, DROPS, FIRST, HARMONY, ALTERNATES, NO_SYSTEM]),
    st.lists(st.sampled_from(["system", "developer"]), max_size=3),
    st.lists(st.sampled_from(["system", "developer", "user", "assistant"]), max_size=8),
)
def test_every_order_of_roles_is_rendered_in_order(template: str, opening: list[str], rest: list[str]) -> None:
    talk = [{"role": role, "content": f"<{at}>"} for at, role in enumerate([*opening, "user", *rest])]
    prompt = tokenizer_of(template).chat(talk)
    places = [prompt.index(message["content"]) for message in talk]
    assert places == sorted(places)


def test_parts_are_texts_beside_calls() -> None:
    """As `LLM.chat` gets them; the server has made texts of them before."""
    part = {"type": "text", "text": "Well."}
    answer = ("tool", {**result(), "content": [part, part]})
    prompt = render(ALTERNATES, ("user", "Go"), ("assistant", {**called(), "content": [part]}), answer)
    assert "<assistant>Well.\n<tool_call>" in prompt and "<tool_response>\nWell.\nWell.\n</tool_response>" in prompt


def test_instructions_keep_their_order_beside_tools() -> None:
    """The demo's template knows no tools; they are a text after the first instructions."""
    tokenizer = Tokenizer.load(jaxserve.demo.model_path())
    talk = [{"role": role, "content": said} for role, said in (("system", "AA"), ("developer", "BB"), ("user", "CC"))]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (None, tools):
        prompt = tokenizer.chat(talk, tools=given)
        places = [prompt.index(text) for text in ("AA", *(["<tools>"] if given else []), "BB", "CC")]
        assert places == sorted(places)


def test_the_demo_model_reads_instructions_at_the_end() -> None:
    """Its template prints a system message with the next message of the user, which may never come."""
    tokenizer = Tokenizer.load(jaxserve.demo.model_path())
    assert "Rules" in tokenizer.chat([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Rules"}])


def called(arguments: Any = "{}", id: str = "call_0123456789abcdef01234567") -> dict[str, Any]:
    return {
        "content": "",
        "tool_calls": [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def result(id: str = "call_0123456789abcdef01234567") -> dict[str, Any]:
    return {"content": "7", "tool_call_id": id}


def test_results_and_the_next_message_are_one_where_roles_alternate() -> None:
    talk = (("user", "Go"), ("assistant", called()), ("tool", result()), ("tool", result()), ("user", "So?"))
    prompt = render(ALTERNATES, *talk)
    assert prompt.count("<user>") == 2 and prompt.count("<tool_response>") == 2 and prompt.endswith("So?")


def test_a_message_after_a_result_is_part_of_it_where_the_template_counts_it() -> None:
    talk = (("user", "Go"), ("assistant", called()), ("tool", result()), ("user", "So?"))
    assert render(COUNTS, *talk) == "<user>Go<assistant><tool>7\n\nSo?"
    assert render(HEADERS, *talk) == "<user>Go<assistant><tool>7<user>So?"


def test_calls_come_one_by_one_where_the_template_takes_one() -> None:
    calls = [{"id": id, "type": "function", "function": {"name": id, "arguments": "{}"}} for id in "abc"]
    said = ("assistant", {"content": None, "tool_calls": calls})
    results = [("tool", {"content": id.upper(), "tool_call_id": id}) for id in "bac"]
    talk = (("user", "Go"), said, *results, ("user", "So?"))
    assert render(ONE_CALL, *talk) == "<user>Go<call b><tool>B<call a><tool>A<call c><tool>C<user>So?"
    assert render(ONE_CALL, ("user", "Go"), said, results[0]) == "<user>Go<call b><tool>B<call a><call c>"
    several = "{% for m in messages %}{{ m.tool_calls | length }}{{ m.content }}{% endfor %}{{ tools }}"
    assert render(several, *talk).startswith("0Go3")


def test_ids_have_the_form_of_the_family() -> None:
    prompt = render(SHORT_IDS, ("user", "Go"), ("assistant", called()), ("tool", result()))
    call, answer = (prompt.partition(f"<{name} ")[2][:9] for name in ("call", "result"))
    assert call == answer and call.isalnum()
    own = render(SHORT_IDS, ("user", "Go"), ("assistant", called(id="aB3dE6gH9")), ("tool", result("aB3dE6gH9")))
    assert own == "<user>Go<call aB3dE6gH9><result aB3dE6gH9>"
    assert render(HEADERS + "{{ messages[1].tool_calls[0].id }}", ("user", "Go"), ("assistant", called())).endswith(
        "call_0123456789abcdef01234567"
    )


def test_an_empty_list_of_calls_is_none() -> None:
    talk = (("user", "Go"), ("assistant", {"content": "Yes", "tool_calls": []}), ("user", "So?"))
    assert render(SHORT_IDS, *talk) == "<user>Go<assistant>Yes<user>So?"


# How families write the arguments of calls in the history.
CALLS = "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
WRITERS = {
    "text or JSON": "{{ a if a is string else a | tojson }}",
    "JSON": "{{ a | tojson }}",
    "joined": "{{ 'x' + a }}",
    "pairs": "{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}",
    "items": "{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}",
}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"path": "/tmp/x", "', "/tmp/x"),
        ("[1, 2]", "[1, 2]"),
        ("3", "3"),
        ("no JSON", "no JSON"),
        ('{"a": NaN}', "NaN"),
    ],
)
@pytest.mark.parametrize("writer", WRITERS)
def test_broken_arguments_reach_every_template(writer: str, arguments: str, seen: str) -> None:
    prompt = render(
        CALLS + WRITERS[writer] + "{% endfor %}{% endfor %}", ("user", "Go"), ("assistant", called(arguments))
    )
    assert seen in prompt
