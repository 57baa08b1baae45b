"""Structured outputs are checked, compiled once, and refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.api.errors import InvalidValue
from jaxserve.sched.api.params import SamplingParams
from jaxserve.sched.api.structured_outputs import MAX_SIZE, StructuredOutputs
from jaxserve.structured.compiler import KEPT, Compiler
from tests.support.structured.bytes import END, tokenizer_json

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler() -> Any:
    made = Compiler(tokenizer_json, 256, [END])
    yield made
    made.close()


def accepts(compiler: Compiler, wanted: StructuredOutputs, text: str) -> bool:
    """Return whether a text matches, from its first byte to its last."""
    matcher = compiler.matcher(wanted)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        ({"json": OBJECT}, ['{"a": 1}', '{"a":-7}', '{\n  "a": 1\n}'], ['{"a": "1"}', "{}", '{"a":\n\n\n1}']),
        ({"json": json.dumps(OBJECT), "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json": OBJECT, "whitespace_pattern": " ?"}, ['{"a":1}', '{ "a": 1 }'], ['{"a":  1}', '{\n"a": 1}']),
        ({"json_object": True}, ["{}", '{"x": [1, null, {"y": "é"}]}'], ["[]", "{"]),
        ({"regex": r"a{2,3}b?"}, ["aa", "aaab"], ["a", "aab!"]),
        ({"choice": ['say "hi"', "no\n"]}, ['say "hi"', "no\n"], ["no", "say"]),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]+/'}, ["x12"], ["x", "12"]),
        ({"grammar": 'root ::= "a" tail\ntail ::= "b" | "c" tail'}, ["ab", "accb"], ["a", "ac"]),
        ({"structural_tag": {"structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f"]}},
         ["free text", 'so <f>{"a":1}</f> then', '<f>{"a":\n 1}</f>'], ["<f>{}</f>", "<f>x", '<f>{"a":\n\n1}</f>']),
        ({"structural_tag": {"structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}], "triggers": ["<f"]},
          "disable_any_whitespace": True}, ["free text", 'so <f>{"a":1}</f> then'], ['<f>{"a": 1}</f>']),
    ],
    ids=["json", "compact", "pattern", "json_object", "regex", "choice", "lark", "gbnf", "tag", "compact tag"],
)  # fmt: skip
def test_kinds(compiler: Compiler, given: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    wanted = StructuredOutputs(**given)
    assert [accepts(compiler, wanted, text) for text in right] == [True] * len(right)
    assert [accepts(compiler, wanted, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({}, "structured_outputs", "exactly one of"),
        ({"json": {}, "regex": "a"}, "structured_outputs", "json and regex are given"),
        ({"json": [1]}, "json", "must be an object"),
        ({"json": True}, "json", "must be an object"),
        ({"regex": 5}, "regex", "must be a text"),
        ({"regex": "a" * (MAX_SIZE + 1)}, "regex", f"at most {MAX_SIZE}"),
        ({"choice": "yes"}, "choice", "must be a list"),
        ({"choice": ["a", ""]}, "choice", "not empty"),
        ({"json_object": "yes"}, "json_object", "true or false"),
        ({"structural_tag": 1}, "structural_tag", "must be an object"),
        ({"json": {}, "whitespace_pattern": "x?"}, "whitespace_pattern", "an expression of blanks"),
        ({"json": {}, "whitespace_pattern": r"\s*"}, "whitespace_pattern", "an expression of blanks"),
        ({"json": {}, "whitespace_pattern": "[ "}, "whitespace_pattern", "is not an expression"),
        ({"json": {}, "whitespace_pattern": " " * 257}, "whitespace_pattern", "at most 256"),
        ({"choice": ["é" * ((1 << 17) + 1)]}, "choice", "has 262146 bytes: at most 262144"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern", "an expression of blanks"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "allowed with json, json_object, struct"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern",
         "disable_any_whitespace are given"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_refused_at_once(given: dict[str, Any], field: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why) as caught:
        StructuredOutputs(**given)
    assert caught.value.param == field


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"structured_outputs.jason is unknown: allowed are .*json") as caught:
        SamplingParams(structured_outputs={"jason": {}})  # type: ignore[arg-type]
    assert caught.value.param == "structured_outputs.jason"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "must be a JSON object, not list"),
        ({"json": "true"}, "must be a JSON object, not bool"),
        ({"json": {"type": "frob"}}, "Invalid type: frob"),
        ({"json": {"unevaluatedProperties": False, "type": "object"}}, "unevaluatedProperties"),
        ({"json": '{"properties":{"a":' * 2000 + "{}" + "}}" * 2000}, "recursion|JSON"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "invalid regex"),
        ({"grammar": "start: nope"}, "unknown name"),
        ({"grammar": 'root ::= "a" b'}, "Rule 'b' not found"),
        (
            {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}}},
            "at most 20000 are allowed",
        ),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "x"}], "triggers": ["<"]}}, "must start with one of"),
    ],
    ids=str,
)
def test_hostile_values_are_refused_for_what_they_are(compiler: Compiler, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValue, match=why) as caught:
        compiler.check(StructuredOutputs(**given))
    assert len(str(caught.value)) < 1000


def test_keywords_that_cannot_be_enforced_are_ignored_if_asked(compiler: Compiler) -> None:
    wanted = StructuredOutputs(json={**OBJECT, "unevaluatedProperties": False}, lenient=True)
    assert accepts(compiler, wanted, '{"a": 1}')
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert accepts(compiler, StructuredOutputs(json=either, lenient=True), "1.5")
    with pytest.raises(InvalidValue, match="oneOf"):
        compiler.check(StructuredOutputs(json=either))


def test_each_is_compiled_once_and_few_are_kept(compiler: Compiler) -> None:
    first = compiler.compile(StructuredOutputs(regex="first"))
    assert compiler.compile(StructuredOutputs(regex="first")) is first
    for number in range(KEPT):
        compiler.check(StructuredOutputs(regex=f"x{number}"))
    assert compiler.compile(StructuredOutputs(regex="first")) is not first
    assert len(compiler._made) == KEPT


def test_a_tokenizer_that_cannot_be_read_is_an_error() -> None:
    broken = Compiler(lambda: "{}", 256, [END])
    with pytest.raises(InvalidValue, match="need a tokenizer of the tokenizers library"):
        broken.check(StructuredOutputs(json_object=True))
    broken.close()


@pytest.mark.parametrize("where", ["added_tokens", "vocab"])
def test_a_tokenizer_may_have_more_tokens_than_the_model(where: str) -> None:
    """As that of a model whose embeddings were never resized; of 608 tokens here, the model has 256."""
    tokenizer = json.loads(tokenizer_json())
    special = tokenizer["added_tokens"][0]
    if where == "added_tokens":
        tokenizer["added_tokens"] += [{**special, "id": id, "content": f"<{id}>"} for id in range(256, 608)]
    else:
        for id in range(256, 608):
            tokenizer["model"]["vocab"][f"a{chr(id)}"] = id
        tokenizer["model"]["vocab"] |= {"ab": 608}
        tokenizer["model"]["merges"] = [["a", "b"]]
    larger = Compiler(lambda: json.dumps(tokenizer), 256, [END])
    assert accepts(larger, StructuredOutputs(regex="[a-z]{3}"), "abc")
    larger.close()


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5))
def test_any_text_can_be_a_choice(compiler: Compiler, texts: list[str]) -> None:
    wanted = StructuredOutputs(choice=tuple(texts))
    for text in texts:
        if chr(END) not in text:
            assert accepts(compiler, wanted, text)
    assert not accepts(compiler, wanted, "".join(texts) + "+")
